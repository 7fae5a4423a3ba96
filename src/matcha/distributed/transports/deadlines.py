"""Deadlines: how long to wait for others, from how long things took here so far."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

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
