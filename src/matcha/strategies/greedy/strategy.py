"""Greedy: the matchings that remove most disagreement, one after another, as a stored cycle.

Each exchange sees the result of the one before (pairwise mixing). Which matching comes next is
chosen by what it gains; the plan stores the outcome as integers, so nothing is left to
floating-point luck at run time. docs/greedy.md derives the method.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from matcha._io.tables import count_noun
from matcha.plans import Plan
from matcha.rounds import Mixing
from matcha.schedules import Cycle
from matcha.strategies.greedy import sketch
from matcha.strategies.greedy.candidates import Candidate, SearchNetwork
from matcha.strategies.greedy.descent import optimize_weights
from matcha.strategies.greedy.initial_cycles import as_circles, initial_cycles
from matcha.strategies.greedy.search import Options, best_cycle
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
_ALL = (0.5, 0.55, 0.6, 0.65)
# Measured on the paper's graphs: `default` is within 2 % of `high` in a third of the time.
_EFFORTS: dict[Effort, Options] = {
    "none": Options(weights=(0.5,), horizons=(0.0,), refine=0, sweeps=0, kicks=0),
    "default": Options(weights=_ALL, horizons=(0.0, 2.0), refine=2, sweeps=8, kicks=0),
    "high": Options(weights=_ALL, horizons=(0.0, 1.0, 2.0, 4.0), refine=8, sweeps=20, kicks=60),
}
_MANY = Options(weights=(0.55, 0.65), horizons=(4.0,), refine=1, sweeps=3, kicks=0)
"""`default` for more than 64 workers."""


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
        network = network_of(request)
        check_storable(math.ceil(min(network.times) / network.rate))  # before a search for nothing
        if network.num_workers <= cycles.EXACT_UP_TO:
            found, note = _exact(request, network, self.effort)
        elif network.directed and not request.topology.directed:
            pairs = network_of(replace(request, mixing="pairwise"))
            found, note = sketch.sketched_cycle(pairs, seed=request.seed, progress=request.progress)
            found = as_circles(found, network)
        else:
            found, note = sketch.sketched_cycle(
                network, seed=request.seed, progress=request.progress
            )
        return _plan(request, found, note)


def network_of(request: Request) -> SearchNetwork:
    """The links with their times, and the time that the budget lets accrue per iteration."""
    topology, timing, push = request.topology, request.timing, request.mixing == "push"
    colors, links = request.colors, topology.arrows if push else topology.links
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
    return SearchNetwork(
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
    n = bisect_right(timing.table, limit) - 1
    if n + 1 == len(timing.table):
        return Fraction(n)
    low, high = Fraction(timing.table[n]), Fraction(timing.table[n + 1])
    return n + Fraction(math.floor((Fraction(limit) - low) / (high - low) * 1000), 1000)


def _exact(request: Request, network: SearchNetwork, wanted: Effort) -> tuple[Candidate, str]:
    """The best cycle by the exact search, and how it compares with never repeating."""
    m = network.num_workers
    options = _MANY if m > 64 and wanted == "default" else _EFFORTS[wanted]
    if m > 32:
        options = options._replace(kicks=0)
    starts = initial_cycles(request.topology, network)
    for start in starts:
        if start.error < _NOTHING:
            number = len(start.matchings)
            return start, (
                f"exact consensus in every iteration, by a known cycle of {number} matchings."
            )
    pairs: Candidate | None = None
    if network.directed and not request.topology.directed:
        # Exchanges are circles of two: never worse than greedy over matchings.
        alike = replace(request, mixing="pairwise")
        pairs = as_circles(_exact(alike, network_of(alike), wanted)[0], network).with_error()
        starts.append(replace(pairs, weights=None).with_error())
    lengths = _cycle_lengths(network, request.topology)
    longest, tried = 2 * max(lengths), []
    while lengths:
        tried.append(best_cycle(network, options, lengths, starts, request.progress))
        best, endless = tried[-1]
        if best.error <= 1.02 * endless or max(lengths) > longest:
            break
        # Repetition costs: longer cycles are tried, twice at most.
        lengths = [2 * n for n in lengths if _affordable(network, 2 * n)]
    best, endless = min(tried, key=lambda found: found[0].error)
    if not math.isfinite(best.error):
        best = sketch.covering(best).with_error()
    if options.sweeps and m <= _WEIGHTED_UP_TO:
        best = optimize_weights(best)
    if pairs is not None and pairs.error < best.error:
        best = pairs
    return best, (
        f"exact search: rounds repeat after {count_noun(len(best.matchings), 'matching')}, with "
        f"{_beside(best.error, endless)} choosing the best next matching for ever."
    )


def _beside(error: float, other: float) -> str:
    """How one consensus error compares with another, without a figure that a wire would change."""
    if math.isclose(error, other, rel_tol=5e-3, abs_tol=1e-12) or other == 0:
        return "the same consensus error as"
    change = error / other - 1
    return f"{abs(change):.0%} {'less' if change < 0 else 'more'} consensus error than"


def _cycle_lengths(network: SearchNetwork, topology: Topology) -> list[int]:
    """About how many matchings to try in a cycle: at least an iteration's worth."""
    least = math.ceil(float(network.rate) / float(np.median(network.seconds)))
    # A star needs a turn of its centre with every leaf: cycles of whole turns waste nothing.
    turns = [n * topology.max_degree for n in (1, 2, 3) if n * topology.max_degree <= 96]
    wanted = sorted({max(n, least) for n in (*_LENGTHS, *turns)})
    return [n for n in wanted if _affordable(network, n)] or wanted[:1]


def _affordable(network: SearchNetwork, length: int) -> bool:
    """Whether a cycle of some matchings has few enough iterations to be stored."""
    return length * float(np.median(network.seconds)) / float(network.rate) <= _LONGEST_CYCLE


def _plan(request: Request, found: Candidate, note: str) -> Plan:
    """The plan that repeats a cycle; what is exchanged twice is stored once."""
    links = request.topology.arrows if found.network.directed else request.topology.links
    places: dict[tuple[Matching, tuple[float, ...]], int] = {}
    order = []
    for n, chosen in enumerate(found.matchings):
        matching = tuple(links[e] for e in chosen.tolist())
        weights = () if found.weights is None else tuple(found.weights[n].tolist())
        order.append(places.setdefault((matching, weights), len(places)))
    cycle = unroll((wait, tuple(order[n] for n in numbers)) for wait, numbers in found.numbers())
    return assemble_plan(
        request,
        matchings=tuple(matching for matching, _ in places),
        schedule=Cycle(cycle=cycle, num_matchings=len(places), seed=request.seed),
        alpha=found.weight,
        weights=None if found.weights is None else tuple(weights for _, weights in places),
        figures={
            "rho": cycles.contraction(found.turns(), found.network.num_workers, found.weight),
            "consensus_error": found.error,
        },
        notes=(note,),
    )
