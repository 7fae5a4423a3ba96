"""The stopwatch: where a worker's time goes, as spans for timelines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from matcha.distributed.exchange.exchange import Exchange
from matcha.records import Span, SpanKind

__all__ = ["Stopwatch"]


class Stopwatch:
    """Times exchanges; where somebody listens, tells computing, waiting and exchanging apart.

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
