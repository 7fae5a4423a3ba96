"""Faults on purpose, one after another: who is away from when to when."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from matcha.plans import PlanLike

_SAMPLE = 1000  # rounds, in which a plan uses every link that it ever does

Who = tuple[int, ...]
"""A worker, or the two ends of a link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One worker, or the link between two, was away."""

    who: Who
    start: float
    end: float
    """When it was started again, went on, or was mended."""
    kind: str = ""
    """In a storm: kill, stop, cut, join or leave."""

    def concerns(self, rank: int, peer: int) -> bool:
        """Whether it explains what went wrong between two workers."""
        return {rank, peer} == set(self.who) if len(self.who) == 2 else self.who[0] in (rank, peer)


def victims(fault: str, plan: PlanLike, seed: int) -> Iterator[Who]:
    """Who is next: rank 0 first, then anybody; or any link, as long as the rest hangs together.

    Only links that the plan uses: cutting or mending others has no effect.
    """
    rng, topology = random.Random(seed), plan.topology
    if fault in ("kill", "stop"):
        yield (0,)
        while True:
            yield (rng.randrange(topology.num_workers),)
    used = {link for round in plan.rounds(0, _SAMPLE) for link in round.links}
    links = [link for link in topology.links if link in used]
    while True:
        link = rng.choice(links)
        if fault == "sever":
            links.remove(link)
            if not _hang_together(links, topology.num_workers):
                links.append(link)
                if len(links) < topology.num_workers:  # a tree: nothing is left to sever
                    return
                continue
        yield link


def _hang_together(links: Sequence[Who], num_workers: int) -> bool:
    reached: set[int] = {0}
    for _ in range(num_workers):
        reached |= {end for link in links if reached & set(link) for end in link}
    return len(reached) == num_workers


def disturb(
    order: Iterable[Who],
    start: Callable[[Who], bool],
    end: Callable[[Who], None] | None,
    *,
    number: int,
    period: float,
    pause: float,
) -> list[Fault]:
    """So many faults, one every `period` seconds and undone after `pause`; what was done.

    Args:
        order: whom they meet.
        start: begins one, or says that it cannot be.
        end: undoes it; None: it is for good.
        number: how many, at most.
        period: seconds from one to the next.
        pause: seconds that one lasts.
    """
    begin, faults = time.monotonic(), []
    for count, who in zip(range(number), order, strict=False):
        _sleep_until(begin + count * period)
        moment = time.monotonic()
        if not start(who):
            continue
        if end is None:
            faults.append(Fault(who=who, start=moment, end=float("inf")))
            continue
        _sleep_until(moment + pause)
        over = time.monotonic()
        end(who)
        faults.append(Fault(who=who, start=moment, end=over))
    return faults


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))
