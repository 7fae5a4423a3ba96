"""Link times: how long this worker's meetings with each neighbour take, without waiting."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict, deque

from matcha.distributed.exchange.exchange import Exchange
from matcha.distributed.exchange.meeting import Meeting, MeetingHook

__all__ = ["LinkTimer", "LinkTimes"]

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
