"""Link times: how long this worker's meetings with each neighbour take, waiting left out."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Sequence

import torch

from matcha.distributed.exchange.exchange import Meeting
from matcha.distributed.exchange.turns import Around, Runner, take_turns
from matcha.rounds import Round

__all__ = ["LinkTimes", "Timed"]

_LATELY = 7  # meetings, of which the median counts
_WAITED = 1e-4  # seconds: less is no waiting


class LinkTimes:
    """What meetings took, by neighbour, since the last time somebody asked.

    Whoever comes to a meeting first sees how long the other's message takes. For who comes second
    part of it lies ready: such a meeting counts only where there is no other.

    >>> times = LinkTimes()
    >>> times.add(1, 0.5, waited=0.1)
    >>> times.add(1, 0.1, waited=0.0)
    >>> times.take(), times.take()
    ({1: 0.5}, {})
    """

    def __init__(self) -> None:
        self._first: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_LATELY))
        self._second: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_LATELY))

    def add(self, peer: int, seconds: float, *, waited: float) -> None:
        """Count one meeting: what it took once both were there, and the wait before."""
        (self._first if waited > _WAITED else self._second)[peer].append(seconds)

    def take(self) -> dict[int, float]:
        """The neighbours met since the last call, and what a meeting with each took lately."""
        found = {**self._second, **self._first}
        self._first.clear()
        self._second.clear()
        return {peer: statistics.median(seconds) for peer, seconds in sorted(found.items())}


class Timed(Around):
    """Carries out rounds one meeting at a time, and keeps what each took."""

    def __init__(self, runner: Runner, values: Sequence[torch.Tensor], times: LinkTimes) -> None:
        super().__init__(runner)
        self._values, self._times = values, times

    def run(self, round: Round, met: Sequence[Meeting], iteration: int) -> None:
        """As `Exchange.run`."""

        def hold(meeting: Meeting) -> bool:
            started, waited = time.perf_counter(), self._runner.wait_seconds
            self._runner.run(round, (meeting,), iteration)
            waited = self._runner.wait_seconds - waited
            seconds = time.perf_counter() - started - waited
            self._times.add(meeting.peer, seconds, waited=waited)
            return True

        take_turns(self._values, round, met, hold)
