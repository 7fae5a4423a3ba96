"""Strategies of low-communication training: rare rounds, and an outer step after each.

Each is a schedule, a wire and an outer step that others have published under a name; their parts
go with other strategies, too: `momentum="outer"`, `wire="topk:64"`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from matcha.mixing import periodic_contraction
from matcha.plans import OuterStep, Plan
from matcha.rounds import Mixing
from matcha.strategies.fixed import Local, period_of, repeat_every
from matcha.strategies.strategy import Request, Strategy, assemble_plan
from matcha.topology import Matching, Topology

_DRAWN = 61
"""Random matchings that a plan holds before they repeat: a prime, so that few periods divide it."""


@dataclass(frozen=True, kw_only=True)
class DiLoCo(Local):
    """Local steps, then an outer step through the exact average (Douillard et al., 2023).

    Args:
        switch: As for `AllReduce`.
        period: As for `Local`.
        mixing: As for `Local`.
        outer_rate: α, of the way to the average.
        outer_momentum: β, of Nesterov's kind.
    """

    name = "diloco"
    about = "rare exact averages, and a Nesterov step through each (DiLoCo)"
    compared = False
    outer_rate: float = 0.7
    outer_momentum: float = 0.9

    def build(self, request: Request) -> Plan:
        step = OuterStep(rate=self.outer_rate, momentum=self.outer_momentum)
        return replace(super().build(request), outer=step)


@dataclass(frozen=True, kw_only=True)
class SparseLoCo(Local):
    """Local steps, then the average of each worker's largest movements (Sarfi et al., 2025).

    Error feedback plays the part of outer momentum, and the outer rate is 1.

    Args:
        switch: As for `AllReduce`.
        period: As for `Local`.
        wire: What is sent of each 4,096 values: `topk:64`, in two bits.
    """

    name = "sparseloco"
    about = "rare averages of the largest movements, with error feedback (SparseLoCo)"
    mixings: ClassVar[tuple[Mixing, ...]] = ("average",)
    compared = False
    wire: str = "topk:64"

    def wires(self, wanted: Iterable[str], topology: Topology) -> list[str]:
        return [self.wire]


@dataclass(frozen=True, kw_only=True)
class NoLoCo(Strategy):
    """Local steps, then an outer step through the mean of a random pair (Kolehmainen et al., 2025).

    Args:
        period: Your own number of iterations from one round to the next.
        outer_rate: α, of the way to the mean; γ of the paper is the same, as in its authors' code.
        outer_momentum: β.
    """

    name = "noloco"
    about = "rare meetings of random pairs, and an outer step through each (NoLoCo)"
    mixings = ("pairwise",)
    period: int | None = None
    outer_rate: float = 0.7
    outer_momentum: float = 0.5

    def build(self, request: Request) -> Plan:
        step = OuterStep(rate=self.outer_rate, momentum=self.outer_momentum, nesterov=False)
        return replace(_random_pairs(request, self.period), outer=step)


@dataclass(frozen=True, kw_only=True)
class GASLoC(Strategy):
    """Local steps, then accelerated gossip as an outer step (Cagnasso et al., 2026).

    Args:
        period: Your own number of iterations from one round to the next.
        pairs: Random pairs meet, as in the paper's sparsest runs, instead of all neighbours.
        outer_rate: η, of the local steps' way, before the round.
        outer_momentum: γ; None: 0.9, and 0.5 for random pairs, which 0.9 may drive apart.
    """

    name = "gasloc"
    about = "rare gossip over all links or random pairs, and a Nesterov step after it (GASLoC)"
    mixings = ("laplacian", "pairwise")
    period: int | None = None
    pairs: bool = False
    outer_rate: float = 0.7
    outer_momentum: float | None = None

    def build(self, request: Request) -> Plan:
        usual = 0.5 if self.pairs else 0.9
        momentum = usual if self.outer_momentum is None else self.outer_momentum
        step = OuterStep(rate=self.outer_rate, momentum=momentum, rate_first=True)
        if self.pairs:
            pairwise = replace(request, mixing="pairwise")
            return replace(_random_pairs(pairwise, self.period), outer=step)
        period = period_of(self.period, request, request.full_time)
        made = assemble_plan(
            replace(request, mixing="laplacian"),
            schedule=repeat_every(period, len(request.colors), request.seed),
            alpha=periodic_contraction(request.topology, 1 / period).alpha,
        )
        return replace(made, outer=step)


def _random_pairs(request: Request, own: int | None) -> Plan:
    """A random matching of as many workers as the links allow, every so many iterations."""
    random = np.random.default_rng(request.seed)
    places: dict[Matching, int] = {}
    rounds = [
        (places.setdefault(_random_matching(request.topology, random), len(places)),)
        for _ in range(_DRAWN)
    ]
    once = max(request.timing.round_time([matching]) for matching in places)
    period = period_of(own, request, once)
    return assemble_plan(
        request,
        matchings=tuple(places),
        schedule=repeat_every(period, len(places), request.seed, rounds),
        alpha=0.5,
        notes=(f"{_DRAWN} random matchings, which repeat.",),
    )


def _random_matching(topology: Topology, random: np.random.Generator) -> Matching:
    """Links taken in a random order, as long as their ends are free."""
    busy: set[int] = set()
    chosen = []
    for place in random.permutation(len(topology.links)).tolist():
        link = topology.links[place]
        if busy.isdisjoint(link):
            busy.update(link)
            chosen.append(link)
    return tuple(sorted(chosen))
