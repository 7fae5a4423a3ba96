"""Strategies with a fixed schedule: all links, exact averages, sums, silence, your own rounds.

What people run today, as strategies like others: an all-reduce costs what a ring takes on these
links, and `local` averages as often as the budget allows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar

from matcha.errors import InputError, PlanError
from matcha.matchings import decompose
from matcha.mixing import laplacian_extremes, periodic_contraction
from matcha.plans import Plan
from matcha.rounds import Mixing
from matcha.schedules import Cycle, EvenlySpaced
from matcha.strategies.finite_time import check_has_links, missing_link, pairwise_average
from matcha.strategies.strategy import (
    Alpha,
    Request,
    Strategy,
    Weights,
    assemble_plan,
    check_affordable,
    sort_pairs,
    unroll,
)
from matcha.timing import LinkSeconds, all_reduce_time
from matcha.topology import Link, Matching, Topology, check_matchings
from matcha.topology.families import complete
from matcha.wires import needs_meetings, parse_wire

_ROOTS = 64  # from which trees are grown


@dataclass(frozen=True, kw_only=True)
class Periodic(Strategy):
    """All links, every so often.

    Args:
        alpha: Your own mixing weight, or what the best is best for: `"rho"` (the default, as in the
            paper) or `"error"`, the consensus error.
        weights: Your own weights of links: a symmetric matrix W that says what a full exchange
            does, `{(i, j): w, …}`, or `"metropolis"`.
    """

    name = "periodic"
    about = "all links, every so often"
    mixings = ("laplacian",)
    compared = True
    alpha: Alpha | None = None
    weights: Weights | None = None

    def build(self, request: Request) -> Plan:
        """Plan a full exchange in a fraction C_b of the iterations, evenly spaced."""
        topology, number = request.topology, len(request.colors)
        frequency = request.budget if self.has_budget else 1.0
        best = periodic_contraction(topology, frequency)
        connectivity = laplacian_extremes(topology.laplacian(), topology)[0]
        return assemble_plan(
            request,
            budget=frequency,
            schedule=EvenlySpaced(frequency=frequency, num_matchings=number, seed=request.seed),
            alpha=best.alpha,
            figures={"rho": best.rho, "algebraic_connectivity": frequency * connectivity},
        )


@dataclass(frozen=True, kw_only=True)
class Vanilla(Periodic):
    """All links at every iteration.

    Args:
        alpha: As for `Periodic`.
        weights: As for `Periodic`.
    """

    name = "vanilla"
    about = "all links at every iteration"
    has_budget = False


@dataclass(frozen=True, kw_only=True)
class AllReduce(Strategy):
    """The exact average at every iteration, as DDP has it.

    Args:
        switch: Whether any two workers are one exchange apart, as behind a switch, where a ring
            all-reduce keeps to the links of the topology otherwise.
    """

    name = "allreduce"
    about = "the exact average at every iteration, as DDP has it"
    mixings = ("average",)
    compared = True
    has_budget = False
    takes_wire = False
    switch: bool = False

    def build(self, request: Request) -> Plan:
        return _averages(_network(request, switch=self.switch), 1, request.full_time)


@dataclass(frozen=True, kw_only=True)
class Local(Strategy):
    """The exact average as often as the budget allows: local SGD.

    Args:
        switch: As for `AllReduce`.
        period: Your own number of iterations H from one average to the next.
        mixing: `average` (the default), an all-reduce of whole values; or `pairwise`, a finite
            sequence of matchings in one round, which is the default over a wire of fewer bits.
    """

    name = "local"
    about = "the exact average every so often (local SGD)"
    mixings: ClassVar[tuple[Mixing, ...]] = ("average", "pairwise")
    compared = True
    switch: bool = False
    period: int | None = None
    mixing: Mixing | None = None

    def wires(self, wanted: Iterable[str], topology: Topology) -> list[str]:
        """Fewer bits only where the links for a sequence of matchings are there."""
        known = list(dict.fromkeys(wanted))
        rounds, _ = pairwise_average(topology.num_workers)
        if not self.switch and missing_link(topology, (rounds,)) is not None:
            known = [wire for wire in known if not needs_meetings(parse_wire(wire))]
        return known or ["float32"]

    def build(self, request: Request) -> Plan:
        behind = _network(request, switch=self.switch)
        if request.mixing == "pairwise":
            rounds, weights = pairwise_average(behind.topology.num_workers)
            what = "an exact average by meetings of two"
            check_has_links(behind.topology, (rounds,), what, "leave the wire out, or ")
            once = behind.timing.round_time(rounds)
            period = period_of(self.period, request, once)
            return assemble_plan(
                behind,
                matchings=rounds,
                schedule=repeat_every(period, len(rounds), request.seed),
                alpha=0.5,
                weights=weights,
                notes=(
                    f"an exact average by {len(rounds)} matchings, one after another, "
                    f"{_every(period)}.",
                ),
            )
        once = all_reduce_time(behind.timing, behind.topology)
        return _averages(behind, period_of(self.period, request, once), request.full_time)


@dataclass(frozen=True, kw_only=True)
class RelaySum(Strategy):
    """RelaySum over a spanning tree (Vogels et al., 2021); with a step before each round, RelaySGD.

    A worker sends each neighbor in the tree the sum of its own model and of what its other
    neighbors sent a round ago. Every model arrives everywhere, with the same weight, as many rounds
    late as there are workers between: what differs between workers' data biases no average.
    """

    name = "relaysum"
    about = "sums relayed along a spanning tree (RelaySGD)"
    mixings = ("relay",)
    takes_wire = False

    def build(self, request: Request) -> Plan:
        """Plan a round over the tree every H iterations, for the smallest H that is affordable."""
        links = spanning_tree(request.topology)
        m = request.topology.num_workers
        matchings = decompose(Topology.from_links(links, m), seed=request.seed)
        once = request.timing.round_time(matchings)
        period = period_of(None, request, once)
        return assemble_plan(
            request,
            matchings=matchings,
            schedule=repeat_every(period, len(matchings), request.seed),
            alpha=1 / m,
            notes=(f"sums are relayed along a tree {_every(period)}.",),
        )


@dataclass(frozen=True, kw_only=True)
class Silent(Strategy):
    """No communication at all: a control."""

    name = "silent"
    about = "no communication at all: a control"
    mixings = ("pairwise",)
    compared = True
    has_budget = False
    is_control = True
    takes_wire = False

    def build(self, request: Request) -> Plan:
        return assemble_plan(
            request,
            budget=0.0,
            schedule=Cycle(cycle=((),), num_matchings=len(request.colors), seed=request.seed),
            alpha=0.5,
            figures={"rho": 1.0, "algebraic_connectivity": 0.0, "consensus_error": math.inf},
            notes=("no worker ever talks: a control, not a way to train.",),
        )


@dataclass(frozen=True, kw_only=True)
class Rounds(Strategy):
    """Your own list of rounds, repeated.

    Args:
        rounds: Each a list of matchings, which are lists of pairs of worker numbers; an empty round
            is an iteration without exchanges.
        mixing: `pairwise` (the default), `laplacian`, or `push` for (sender, receiver).
        alpha: Your own mixing weight, or `"error"`: the best for the consensus error.
        weights: As for `Periodic`, with laplacian mixing.
    """

    name = "rounds"
    about = "your own list of rounds, repeated"
    mixings = ("pairwise", "laplacian", "push")
    needs_rounds = True
    has_budget = False
    rounds: Iterable[Iterable[Iterable[Sequence[int]]]] | None = None
    mixing: Mixing | None = None
    alpha: Alpha | None = None
    weights: Weights | None = None

    def build(self, request: Request) -> Plan:
        if self.rounds is None:
            raise InputError("the rounds strategy needs rounds=[[[(i, j), …], …], …].")
        push = request.mixing == "push"
        try:
            rounds = tuple(sort_pairs(round_, push=push) for round_ in self.rounds)
        except TypeError:
            raise PlanError("rounds are lists of matchings, [[[(i, j), …], …], …].") from None
        listed = tuple(links for round_ in rounds for links in round_)
        check_matchings(request.topology, listed, push=push)
        places: dict[Matching, int] = {}
        cycle = tuple(
            tuple(places.setdefault(matching, len(places)) for matching in round_)
            for round_ in rounds
        )
        if not places:
            raise InputError("no round has a matching: give at least one round one.")
        matchings = tuple(places)
        schedule = Cycle(cycle=cycle, num_matchings=len(matchings), seed=request.seed)
        cost = schedule.expected_time(request.timing, matchings)
        check_affordable(request, cost, request.budget * request.full_time, "the rounds")
        return assemble_plan(
            request,
            matchings=matchings,
            schedule=schedule,
            alpha=0.5 if request.mixing != "laplacian" else _laplacian_weight(rounds),
            notes=("the rounds are yours.",),
        )


def _network(request: Request, *, switch: bool) -> Request:
    """The same request; behind a switch, every worker reaches all others over its best link."""
    if not switch:
        return request
    topology, timing = request.topology, request.timing
    whole = complete(topology.num_workers)
    if timing.unit == "seconds":
        best = [math.inf] * topology.num_workers
        for i, j in topology.links:
            seconds = timing.matching_time(((i, j),))
            best[i], best[j] = min(best[i], seconds), min(best[j], seconds)
        whole = whole.with_link_times([max(best[i], best[j]) for i, j in whole.links])
        timing = LinkSeconds(whole)
    whole = replace(whole, name=f"{topology.name}, behind a switch", labels=topology.labels)
    return replace(request, topology=whole, timing=timing, matchings=request.colors)


def period_of(own: int | None, request: Request, once: float) -> int:
    """Iterations between rounds that take `once`: the user's own, or as few as are affordable."""
    if own is not None:
        check_affordable(request, once / own, request.budget * request.full_time, "such averages")
        return own
    # In exact numbers: of the smallest budgets a float would be 0, or the quotient infinite.
    ratio = Fraction(once) / (Fraction(request.budget) * Fraction(request.full_time))
    return max(1, math.ceil(ratio - Fraction(1, 10**9)))


def repeat_every(
    period: int, num_matchings: int, seed: int, rounds: Iterable[Iterable[int]] | None = None
) -> Cycle:
    """A round of all matchings every so many iterations; or one of some rounds after another."""
    chosen = [range(num_matchings)] if rounds is None else rounds
    cycle = unroll((period, tuple(round_)) for round_ in chosen)
    return Cycle(cycle=cycle, num_matchings=num_matchings, seed=seed)


def _every(period: int) -> str:
    return f"every {period} iterations" if period > 1 else "at every iteration"


def _averages(request: Request, period: int, full_time: float) -> Plan:
    """The plan that averages exactly every so many iterations."""
    m = request.topology.num_workers
    schedule = repeat_every(period, len(request.colors), request.seed)  # refuses endless periods
    spent = all_reduce_time(request.timing, request.topology) / (period * full_time)
    return assemble_plan(
        request,
        budget=min(1.0, spent) if request.strategy == "allreduce" else request.budget,
        schedule=schedule,
        alpha=1 / m,
        figures={
            "rho": 1 - 1 / period,
            # Disagreement grows by (m − 1)/m per iteration and is gone after an average.
            "consensus_error": (period - 1) / 2 * (m - 1) / m,
        },
        notes=(
            f"an exact average {_every(period)}, charged as a ring all-reduce on "
            f"{request.topology.name}.",
        ),
    )


def _laplacian_weight(rounds: Iterable[tuple[Matching, ...]]) -> float:
    """1 / (1 + the largest degree in a round): no worker's own weight goes below zero."""
    met = (Counter(w for links in round_ for link in links for w in link) for round_ in rounds)
    return 1 / (1 + max(max(counts.values(), default=0) for counts in met))


def spanning_tree(topology: Topology) -> tuple[Link, ...]:
    """A tree of the topology with few links per worker, and few between any two workers.

    A worker sends over its links one after another, so few links make quick rounds; what others
    sent is late by the links between. Trees are grown breadth first from every worker, with three
    links per worker where that reaches all, and the lowest of them is taken.
    """
    m = topology.num_workers
    roots = range(0, m, max(1, m // _ROOTS))
    for most in range(3, m + 3):
        grown = (_grow(topology, root, most) for root in roots)
        trees = [(depth, links) for depth, links in grown if len(links) == m - 1]
        if trees:
            break
    _, lowest = min(trees, key=lambda tree: tree[0])
    return tuple(sorted((min(link), max(link)) for link in lowest))


def _grow(topology: Topology, root: int, most: int) -> tuple[int, list[Link]]:
    """A tree grown breadth first, with at most so many links per worker: its depth, its links."""
    links: list[Link] = []
    depth, free, queue = {root: 0}, {root: most}, [root]
    for parent in queue:
        for child in topology.neighbors(parent):
            if child not in depth and free[parent]:
                links.append((parent, child))
                queue.append(child)
                depth[child] = depth[parent] + 1
                free[parent] -= 1
                free[child] = most - 1
    return max(depth.values()), links
