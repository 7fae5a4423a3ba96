"""Greedy: the matchings that remove most disagreement, one after another, as a stored cycle.

Each exchange sees the result of the one before (pairwise mixing). Which matching comes next is
chosen by what it gains; the plan stores the outcome as integers, so nothing is left to
floating-point luck at run time. docs/greedy.md derives the method.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from matcha._io.tables import count_noun
from matcha.plans import Plan
from matcha.rounds import Mixing
from matcha.schedules import Cycle
from matcha.strategies.greedy import sketch
from matcha.strategies.greedy.candidates import Candidate, Network
from matcha.strategies.greedy.descent import optimize_weights
from matcha.strategies.greedy.initial_cycles import as_circles, initial_cycles
from matcha.strategies.greedy.search import HORIZONS, WEIGHTS, Found, best_cycle
from matcha.strategies.strategy import (
    Alpha,
    Effort,
    Request,
    Strategy,
    assemble_plan,
    check_storable,
    simple,
    unroll,
)
from matcha.theory import cycles
from matcha.timing import RandomLinks, Scaled, Underlay
from matcha.topology import Matching, Topology

_LENGTHS = (8, 12, 16, 24, 36, 48)
_LONGEST_CYCLE = 200_000
_NOTHING = 1e-12  # of consensus error: rounding
_WEIGHTED_UP_TO = 128  # workers; a weight for each link takes a second there


@dataclass(frozen=True, slots=True, kw_only=True)
class _Effort:
    weights: tuple[float, ...]
    horizons: tuple[float, ...]
    refine: int
    sweeps: int
    kicks: int


# Measured on the paper's graphs: `default` is within 2 % of `high` in a third of the time.
_EFFORTS: dict[Effort, _Effort] = {
    "none": _Effort(weights=(0.5,), horizons=(0.0,), refine=0, sweeps=0, kicks=0),
    "default": _Effort(weights=WEIGHTS, horizons=(0.0, 2.0), refine=2, sweeps=8, kicks=0),
    "high": _Effort(weights=WEIGHTS, horizons=HORIZONS, refine=8, sweeps=20, kicks=60),
}


@dataclass(frozen=True, kw_only=True)
class Greedy(Strategy):
    """The matchings that remove most disagreement, one after another, as a stored cycle.

    Args:
        mixing: `pairwise` (the default), or `push` for messages that go one way.
        effort: How long to search for a good cycle: `none`, `default` or `high`.
        alpha: Your own weight of every exchange; by default the best for the consensus error.
    """

    name = "greedy"
    about = "the matchings that remove most disagreement, as a cycle"
    mixings = ("pairwise", "push")
    compared = True
    mixing: Mixing | None = None
    effort: Effort = "default"
    alpha: Alpha | None = None

    def build(self, request: Request) -> Plan:
        """Search for a cycle: exactly on small graphs, by sketch on large ones."""
        if request.alpha == "error":  # its search is for that alone
            request = replace(request, alpha=None)
        colors, m = request.colors, request.topology.num_workers
        network = network_of(request, colors)
        check_storable(math.ceil(min(network.times) / network.rate))  # before a search for nothing
        if m <= cycles.EXACT_UP_TO:
            found, notes = _exact(request, network, self.effort)
        else:
            pairs = network
            if not request.topology.directed:
                pairs = network_of(replace(request, mixing="pairwise"), colors)
            sketched = sketch.sketched_cycle(pairs, seed=request.seed, progress=request.progress)
            found, notes = sketched.best, sketched.notes
            if network.directed and not pairs.directed:
                found = replace(as_circles(found, network), error=found.error)
        return _plan(request, colors, found, notes)


def network_of(request: Request, colors: Sequence[Matching]) -> Network:
    """The links with their times, and the time that the budget lets accrue per iteration."""
    topology, timing, push = request.topology, request.timing, request.mixing == "push"
    links = topology.arrows if push else topology.links
    times = tuple(Fraction(timing.matching_time((link,))) for link in links)
    if isinstance(timing, Scaled):
        # Only how many matchings a round has counts: pace them, one unit each.
        times = (Fraction(1),) * len(links)
        rate = _scaled_pace(timing, request.budget * timing.round_time(colors))
    elif len(set(times)) == 1 and not isinstance(timing, Underlay):
        # In exact decimals: a budget of 0.3 with 10 matchings is 3 per iteration, no less.
        rate = simple(Fraction(repr(request.budget)) * len(colors), 1000) * times[0]
    else:
        rate = Fraction(timing.allowance(colors, request.budget))
    columns = [topology.columns[link] for link in links]
    return Network(
        num_workers=topology.num_workers,
        links=np.array(links)[:, ::-1] if push else topology.link_array,
        times=times,
        rate=rate,
        seed=request.seed,
        directed=push,
        loads=timing.loads[:, columns] if isinstance(timing, Underlay) else None,
        samples=np.array(timing.samples)[:, columns] if isinstance(timing, RandomLinks) else None,
    )


def _scaled_pace(timing: Scaled, limit: float) -> Fraction:
    """The most matchings per iteration, spread evenly, whose mean time t(n) is within the limit."""
    n = 0
    while timing.table[n + 1] <= limit if n + 1 < len(timing.table) else False:
        n += 1
    if n + 1 >= len(timing.table):
        return Fraction(n)
    low, high = Fraction(timing.table[n]), Fraction(timing.table[n + 1])
    part = (Fraction(limit) - low) / (high - low)
    return n + Fraction(math.floor(part * 1000), 1000) if part < 1 else Fraction(n + 1)


def _exact(request: Request, network: Network, wanted: Effort) -> tuple[Candidate, tuple[str, ...]]:
    """The best cycle by the exact search, and how it compares with never repeating."""
    effort, m = _EFFORTS[wanted], network.num_workers
    if m > 64 and wanted == "default":
        effort = replace(effort, weights=(0.55, 0.65), horizons=(4.0,), refine=1, sweeps=3)
    lengths = _cycle_lengths(network, request.topology)
    starts = initial_cycles(request.topology, network)
    for start in starts:
        if start.error < _NOTHING:
            number = len(start.matchings)
            note = f"exact consensus in every iteration, by a known cycle of {number} matchings."
            return start, (note,)
    pairs: Candidate | None = None
    if network.directed and not request.topology.directed:
        # Exchanges are circles of two: never worse than greedy over matchings.
        alike = replace(request, mixing="pairwise")
        pairs = _exact(alike, network_of(alike, alike.colors), wanted)[0]
        pairs = as_circles(pairs, network)
        starts.append(replace(pairs, weights=None).with_error())
    first = max(lengths)
    found: Found | None = None
    while lengths:
        other = best_cycle(
            network,
            lengths=lengths,
            weights=effort.weights,
            horizons=effort.horizons,
            refine=effort.refine,
            sweeps=effort.sweeps,
            kicks=effort.kicks if m <= 32 else 0,
            starts=starts,
            progress=request.progress,
        )
        if found is None or other.best.error < found.best.error:
            found = other
        if other.best.error <= 1.02 * other.endless or max(lengths) > 2 * first:
            break
        # Repetition costs: longer cycles are tried, twice at most.
        lengths = [2 * n for n in lengths if _affordable(network, 2 * n)]
    assert found is not None
    best = (
        found.best if math.isfinite(found.best.error) else sketch.covering(found.best).with_error()
    )
    if effort.sweeps and m <= _WEIGHTED_UP_TO:
        best = optimize_weights(best)
    if pairs is not None and pairs.error < best.error:
        best = pairs
    return best, (
        f"exact search: rounds repeat after {count_noun(len(best.matchings), 'matching')}, with "
        f"{_beside(best.error, found.endless)} choosing the best next matching for ever.",
    )


def _beside(error: float, other: float) -> str:
    """How one consensus error compares with another, without a figure that a wire would change."""
    if math.isclose(error, other, rel_tol=5e-3, abs_tol=1e-12) or other == 0:
        return "the same consensus error as"
    change = error / other - 1
    return f"{abs(change):.0%} {'less' if change < 0 else 'more'} consensus error than"


def _cycle_lengths(network: Network, topology: Topology) -> list[int]:
    """About how many matchings to try in a cycle: at least an iteration's worth."""
    cost = float(np.median(network.seconds))
    least = math.ceil(float(network.rate) / cost)
    # A star needs a turn of its centre with every leaf: cycles of whole turns waste nothing.
    turns = [n * topology.max_degree for n in (1, 2, 3) if n * topology.max_degree <= 96]
    wanted = sorted({max(n, least) for n in (*_LENGTHS, *turns)})
    return [n for n in wanted if _affordable(network, n)] or wanted[:1]


def _affordable(network: Network, length: int) -> bool:
    """Whether a cycle of some matchings has few enough iterations to be stored."""
    cost = float(np.median(network.seconds))
    return length * cost / float(network.rate) <= _LONGEST_CYCLE


# -- the plan -----------------------------------------------------------------------------------


def _plan(
    request: Request, colors: Sequence[Matching], found: Candidate, notes: tuple[str, ...]
) -> Plan:
    """The plan that repeats a cycle."""
    topology, m = request.topology, request.topology.num_workers
    links = topology.arrows if found.network.directed else topology.links
    shares = found.weights or (None,) * len(found.matchings)
    distinct: dict[bytes, int] = {}
    matchings: list[Matching] = []
    weights: list[tuple[float, ...]] = []
    places = []
    for chosen, own in zip(found.matchings, shares, strict=True):
        key = chosen.tobytes() + (b"" if own is None else own.tobytes())
        if key not in distinct:
            distinct[key] = len(matchings)
            matchings.append(tuple(links[e] for e in chosen.tolist()))
            weights.append(() if own is None else tuple(own.tolist()))
        places.append(distinct[key])
    cycle = unroll((wait, tuple(places[n] for n in numbers)) for wait, numbers in found.numbers())
    return assemble_plan(
        request,
        matchings=tuple(matchings),
        schedule=Cycle(cycle=cycle, num_matchings=len(matchings), seed=request.seed),
        alpha=found.weight,
        weights=None if found.weights is None else tuple(weights),
        figures={
            "rho": cycles.contraction(found.turns(), m, found.weight),
            "consensus_error": found.error,
        },
        notes=notes,
    )
