"""Timers: how long meetings with each neighbour take, and where a worker's time goes."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from matcha.distributed.exchange.exchange import Exchange
from matcha.distributed.exchange.meeting import Meeting, MeetingHook
from matcha.records import Span, SpanKind

__all__ = ["LinkTimer", "LinkTimes", "Stopwatch"]

_RECENT = 7  # meetings, of which the median counts
_WAITED = 1e-4  # seconds: less does not count as waiting


class LinkTimes:
    """What meetings took, by neighbour, since the last call of `take`.

    The end that comes to a meeting first sees how long the other's message takes. For the one that
    comes second, part of it has arrived already: such a meeting counts only if there is no other.

    >>> times = LinkTimes()
    >>> times.add(1, 0.5, waited=0.1)
    >>> times.add(1, 0.1, waited=0.0)
    >>> times.take(), times.take()
    ({1: 0.5}, {})
    """

    def __init__(self) -> None:
        self._first: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_RECENT))
        self._second: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_RECENT))

    def add(self, peer: int, seconds: float, *, waited: float) -> None:
        """Count one meeting: what it took once both were there, and the wait before."""
        (self._first if waited > _WAITED else self._second)[peer].append(seconds)

    def take(self) -> dict[int, float]:
        """The neighbours met since the last call, and the median time of recent meetings."""
        found = {**self._second, **self._first}
        self._first.clear()
        self._second.clear()
        return {peer: statistics.median(seconds) for peer, seconds in sorted(found.items())}


class LinkTimer(MeetingHook):
    """Measures each meeting of an exchange."""

    def __init__(self, exchange: Exchange, times: LinkTimes) -> None:
        self._exchange, self._times = exchange, times
        self._started = self._waited = 0.0

    def before(self, meeting: Meeting, iteration: int) -> bool:
        """As `MeetingHook.before`."""
        self._started, self._waited = time.perf_counter(), self._exchange.wait_seconds
        return True

    def after(self, meeting: Meeting) -> None:
        """As `MeetingHook.after`."""
        waited = self._exchange.wait_seconds - self._waited
        seconds = time.perf_counter() - self._started - waited
        self._times.add(meeting.peer, seconds, waited=waited)


class Stopwatch:
    """Times exchanges; tells computing, waiting and exchanging apart where spans are asked for.

    Attributes:
        listens: whether spans are wanted.
        exchange_seconds: spent in exchanges so far, waiting for partners included.
    """

    def __init__(self, worker: int, on_span: Callable[[Span], None] | None) -> None:
        self._worker = worker
        self._on_span = on_span
        self.listens = on_span is not None
        self.exchange_seconds = 0.0
        self.restart()

    def restart(self) -> None:
        """Count the next stretch of computing from now."""
        self._free_since = time.perf_counter()

    def computed(self, iteration: int) -> None:
        """A stretch of computing ends here."""
        self._emit("compute", iteration, self._free_since, time.perf_counter())

    @contextmanager
    def exchanging(self, exchange: Exchange, iteration: int) -> Iterator[None]:
        """An exchange runs inside."""
        started, waited = time.perf_counter(), exchange.wait_seconds
        yield
        ended = time.perf_counter()
        ready = started + (exchange.wait_seconds - waited)
        self.exchange_seconds += ended - started
        self._emit("wait", iteration, started, ready)
        self._emit("exchange", iteration, ready, ended)

    def _emit(self, kind: SpanKind, iteration: int, start: float, end: float) -> None:
        if self._on_span is not None:
            worker = self._worker
            span = Span(worker=worker, iteration=iteration, kind=kind, start=start, end=end)
            self._on_span(span)
