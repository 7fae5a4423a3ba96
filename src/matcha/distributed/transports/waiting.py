"""Waiting: how long to wait for others, and why a peer does not come.

A deadline follows how long things took here so far. A short wait costs nothing. In a long wait a
worker publishes which peer it waits for and in which call, and reads what others published. It
waits beyond the timeout for a peer that said it is away, not at all for one that has finished, and
workers that wait for one another in different calls are told so at once.
"""

from __future__ import annotations

import math
import time
from collections import deque
from statistics import median

from matcha.distributed.transports.base import Transport
from matcha.errors import ExchangeError

START = 300.0
"""Seconds to wait for a worker as long as nothing is measured: its first iteration may compile."""
_FEW = 8  # measurements before which none of them decides; as many are averaged for the next look
_RECENT = 64


class Durations:
    """How long something took the last times, and how long to wait for it the next time.

    That is twice the median and four standard deviations, so one outlier of 64 is waited for once
    more (it makes a deviation of an eighth of itself), and regular ones twice as long.

    >>> gaps = Durations()
    >>> gaps.deadline(floor=1.0, start=3.0)
    3.0
    >>> for seconds in [0.2, 0.3] * 8: gaps.note(seconds)
    >>> round(gaps.deadline(floor=0.0), 6), gaps.deadline(floor=1.0)
    (0.9, 1.0)
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._num_noted = 0
        self._wait: float | None = None

    def note(self, seconds: float) -> None:
        """Count one time."""
        self._recent.append(seconds)
        self._num_noted += 1
        if self._num_noted % _FEW == 0:
            mean = sum(self._recent) / len(self._recent)
            variance = sum((each - mean) ** 2 for each in self._recent) / len(self._recent)
            self._wait = 2 * (median(self._recent) + 4 * math.sqrt(variance))

    def deadline(self, floor: float, start: float = START) -> float:
        """Seconds to wait: at least the floor; `start` before there are enough measurements."""
        return start if self._wait is None else max(floor, self._wait)


class Pace:
    """How long an iteration usually takes; the first, and stops of the process, do not count.

    >>> pace = Pace(0)
    >>> for iteration, now in enumerate([0.001, 0.1, 0.2, 5.2], start=1):
    ...     pace.note(iteration, now)
    >>> round(pace.seconds, 3)
    0.1
    """

    def __init__(self, iteration: int) -> None:
        self._iteration = iteration
        self._since: float | None = None
        self._last: deque[float] = deque(maxlen=9)
        self.durations = Durations()

    def note(self, iteration: int, now: float) -> None:
        """The worker has come to an iteration; the same one may be noted more than once."""
        if iteration == self._iteration:
            return
        if self._since is not None and iteration > self._iteration:
            taken = (now - self._since) / (iteration - self._iteration)
            self._last.append(taken)
            self.durations.note(taken)
        self._iteration, self._since = iteration, now

    @property
    def seconds(self) -> float | None:
        """The median of the last few; None before there are any."""
        return max(median(self._last), 1e-6) if self._last else None


_SPIN = 1e-3  # seconds of looking without a pause: most answers are near
_LONG = 1.0  # seconds after which a wait is published


class StallDetector:
    """One wait of this worker for one peer, whose silence for `timeout` seconds is an error."""

    def __init__(self, transport: Transport, peer: int, timeout: float) -> None:
        self._transport, self._peer, self._timeout = transport, peer, timeout
        self._patience = min(2.0, 0.2 * timeout)  # the rest is for finding the cause
        self._started = time.monotonic()
        self._end = self._started + timeout - self._patience
        self.slice = min(_LONG, 0.2 * timeout)
        self._next_look = self._started + self.slice
        self._noted = self._has_finished = False
        self._cycle: tuple[str, ...] | None = None

    def pause(self) -> None:
        """Sleep for a moment, longer the longer it has taken; look at the notes now and then."""
        now = time.monotonic()
        if now >= self._next_look:
            self.look()
        waited = now - self._started
        time.sleep(0.0 if waited < _SPIN else min(5e-3, waited / 50))

    def look(self) -> None:
        """Read what the others have published.

        Raises:
            ExchangeError: Waiting longer is of no use.
        """
        now = time.monotonic()
        self._next_look = now + self.slice
        transport = self._transport
        if not self._noted and not transport.asynchronous:
            self._noted = True
            transport.report_waiting_on(self._peer)
            transport.set_note("in", transport.doing)
        transport.probe(self._peer)
        chain = transport.waiting_chain(self._peer)
        if transport.get_note(chain[-1], "away"):
            self._end = now + self._timeout - self._patience
        if transport.get_note(self._peer, f"finished/{transport.period}"):
            if self._has_finished:  # found twice: its last message may have come just now
                raise transport.failure(self._peer, "has finished", 0.0)
            self._has_finished = True
        self._check_cycle(chain)
        if now > self._end:
            problem = f"did not answer within {self._timeout:g} s"
            raise transport.failure(self._peer, problem, self._patience)

    def end(self) -> None:
        """The peer came: remove what was published."""
        if self._noted:
            self._transport.report_waiting_on(None)
            self._transport.set_note("in", "")

    def _check_cycle(self, chain: list[int]) -> None:
        """Workers that wait for one another in one call are only slow; in two calls they never end.

        Notes may be a moment old, so the same must be found twice.
        """
        transport = self._transport
        calls = None
        if transport.rank in chain:
            around = chain[: chain.index(transport.rank) + 1]
            calls = tuple(str(transport.get_note(rank, "in")) for rank in around)
        if calls is None or len({*calls, transport.doing}) == 1 or "" in calls:
            self._cycle = None
        elif calls != self._cycle:
            self._cycle = calls
        else:
            transport.failed = True
            said = ", ".join(
                f"{transport.name(rank)} is in {call}"
                for rank, call in zip(around, calls, strict=True)
            )
            raise ExchangeError(
                f"the workers wait for one another in different calls: {said}; every worker must "
                "make collective calls, like averaged(), at the same iteration."
            )
