"""Pace: when workers of different speeds step and meet, on a clock, without a word of models.

`Agenda` is for workers that meet when both have time, as `Gossip(..., asynchronous=True)` does;
`LinkClock` for workers in step, who wait for the partners of their round only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias

from matcha.errors import InputError
from matcha.plans import PlanLike
from matcha.rounds import Round
from matcha.topology import Link
from matcha.training.settings import Delays

What: TypeAlias = Literal["step", "begin", "end"]
LinkSeconds: TypeAlias = Callable[[Link], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """A worker's step ends, or a meeting of two begins or ends."""

    what: What
    time: float
    workers: tuple[int, ...]
    """The worker, or the two, the lower one first."""
    weight: float = 0.0
    """The weight of the meeting."""


def compute_times(delays: Delays, seconds: float, num_workers: int) -> list[float]:
    """What a gradient takes each worker.

    >>> compute_times(Delays(speeds=(1.0, 0.25)), 0.1, 2)
    [0.1, 0.4]
    """
    speeds = delays.speeds or (1.0,) * num_workers
    if len(speeds) != num_workers:
        raise InputError(
            f"there are {len(speeds)} speeds for {num_workers} workers: give each one."
        )
    return [seconds / speed for speed in speeds]


def link_seconds(plan: PlanLike, delays: Delays) -> LinkSeconds:
    """What a meeting takes on a link that has its wires to itself."""

    @cache
    def seconds(link: Link) -> float:
        return delays.of(plan.timing.round_time(((link,),)), plan.timing.unit)

    return seconds


class Agenda:
    """What happens next when a worker does not wait: one happening after the other.

    At the end of its step a worker wants the partners of its next round, who may be wanted already,
    and goes on. Two that want each other meet as soon as neither is in a meeting; the oldest wish
    comes first.

    The plan's rounds say whom a worker wants at which of its own iterations; `compute` is what each
    worker's step takes, `seconds` a meeting over a link.

    >>> import matcha
    >>> plan = matcha.plan(matcha.families.path(2), 1.0, "vanilla")
    >>> agenda = Agenda(plan, [1.0, 2.5], lambda link: 0.25)
    >>> [(h.what, h.time, h.workers) for h in map(lambda _: agenda.next(), range(5))]
    [('begin', 0.0, (0, 1)), ('end', 0.25, (0, 1)), ('step', 1.0, (0,)), ('step', 2.0, (0,)), \
('step', 2.5, (1,))]
    """

    def __init__(self, plan: PlanLike, compute: Sequence[float], seconds: LinkSeconds) -> None:
        self._plan, self._compute, self._seconds = plan, list(compute), seconds
        self.iterations = [0] * len(compute)
        """Each worker's finished steps."""
        self.time = 0.0
        self._steps = list(compute)  # when each worker's step ends
        self._wanted: dict[tuple[int, int], float] = {}  # who wants whom, at which weight; in order
        self._under_way: list[tuple[float, Link, float]] = []
        self._begun: deque[tuple[float, Link, float]] = deque()
        for worker in range(len(compute)):
            self._want(worker)
        self._pair()

    @property
    def next_time(self) -> float:
        """When something happens next."""
        if self._begun:
            return self.time
        return min([*self._steps, *(end for end, _, _ in self._under_way)])

    def next(self) -> Happening:
        """What happens next."""
        if self._begun:
            time, link, weight = self._begun.popleft()
            return Happening(what="begin", time=time, workers=link, weight=weight)
        self.time = self.next_time
        ending = min(self._under_way, default=None)
        if ending is not None and ending[0] <= self.time:
            self._under_way.remove(ending)
            found = Happening(what="end", time=self.time, workers=ending[1], weight=ending[2])
        else:
            worker = self._steps.index(self.time)
            self.iterations[worker] += 1
            self._steps[worker] = self.time + self._compute[worker]
            self._want(worker)
            found = Happening(what="step", time=self.time, workers=(worker,))
        self._pair()
        return found

    def _want(self, worker: int) -> None:
        round = self._plan.round(self.iterations[worker])
        for position, matching in enumerate(round.matchings):
            for link, weight in zip(matching, round.shares(position), strict=True):
                if worker in link:
                    i, j = link
                    self._wanted.setdefault((worker, j if worker == i else i), weight)

    def _pair(self) -> None:
        busy = {worker for _, link, _ in self._under_way for worker in link}
        for i, j in list(self._wanted):
            if (j, i) not in self._wanted:
                continue
            is_held_up = i in busy or j in busy
            # A free worker waits for the partner of its oldest wish: two that have just met would
            # otherwise be the only free ones, and meet again and again.
            busy |= {i, j}
            if is_held_up:
                continue
            weight = (self._wanted.pop((i, j)) + self._wanted.pop((j, i))) / 2
            link = (min(i, j), max(i, j))
            self._under_way.append((self.time + self._seconds(link), link, weight))
            self._begun.append((self.time, link, weight))

    def state(self) -> dict[str, Any]:
        """Where it is, in plain values."""
        return {
            "time": self.time,
            "iterations": list(self.iterations),
            "steps": list(self._steps),
            "wanted": [(i, j, weight) for (i, j), weight in self._wanted.items()],
            "under_way": list(self._under_way),
            "begun": list(self._begun),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self.time = state["time"]
        self.iterations, self._steps = list(state["iterations"]), list(state["steps"])
        self._wanted = {(i, j): weight for i, j, weight in state["wanted"]}
        self._under_way = [(end, tuple(link), weight) for end, link, weight in state["under_way"]]
        self._begun = deque((time, tuple(link), weight) for time, link, weight in state["begun"])


class LinkClock:
    """When each worker has finished an iteration, if it waits for its partners only.

    `compute` is what each worker's gradient takes, `seconds` an exchange over a link; `beside` the
    gradient it runs from the iteration's beginning.

    >>> pair = Round(matchings=(((0, 1),),), indices=(0,), mixing="pairwise", weight=0.5)
    >>> clock = LinkClock([1.0, 4.0, 1.0], lambda link: 0.5, beside=False)
    >>> clock.iterate(pair)
    >>> clock.times
    [4.5, 4.5, 1.0]
    """

    def __init__(self, compute: Sequence[float], seconds: LinkSeconds, *, beside: bool) -> None:
        self.compute, self._seconds, self._beside = list(compute), seconds, beside
        self.times = [0.0] * len(self.compute)

    def iterate(self, round: Round, average: float = 0.0) -> None:
        """Let all workers finish an iteration; `average`: seconds of a round that averages all."""
        computed = [time + own for time, own in zip(self.times, self.compute, strict=True)]
        free = list(self.times if self._beside else computed)
        if round.is_all_reduce and round:
            free = [max(free) + average] * len(free)
        else:
            for matching in round.matchings:
                before = list(free)
                for i, j in matching:
                    end = max(before[i], before[j]) + self._seconds((i, j))
                    free[i], free[j] = max(free[i], end), max(free[j], end)
        self.times = [max(pair) for pair in zip(free, computed, strict=True)]
