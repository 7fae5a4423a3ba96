"""Sequences that reach exact consensus in finitely many rounds, on graphs with the links for it.

For m = 2^d workers, d matchings leave every worker with the mean: in matching t everyone meets the
worker whose number differs in bit t. Other numbers of workers: `base`, `one_peer`, `ceca`.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate

from matcha.errors import InputError
from matcha.plans import Plan
from matcha.rounds import Shares
from matcha.schedules import Cycle
from matcha.strategies.pacing import LONGEST_CYCLE, simple, timeline, unrolled
from matcha.strategies.parts import coloring, finished
from matcha.strategies.strategy import Request
from matcha.topology import Link, Matching, Topology

_MOST_TURNS = 64


def hypercube(request: Request) -> Plan:
    """Plan to average with the neighbour across one dimension of a hypercube after another.

    Raises:
        InputError: The number of workers is not a power of two, or links are missing.
    """
    m = request.topology.num_workers
    groups = tuple((matching,) for matching in hypercube_matchings(m))
    if not groups:
        raise InputError(f"a hypercube needs a power of 2 workers, not {m}.")
    missing = missing_link(request.topology, groups)
    if missing is not None:
        raise InputError(
            f"a hypercube needs the link {missing}, which the topology does not have: number the "
            "workers so that neighbours differ in one bit, or use greedy, which works anywhere."
        )
    note = f"exact consensus after {len(groups)} rounds of base 2."
    return repeated(request, groups, alpha=0.5, note=note)


def hypercube_matchings(num_workers: int) -> tuple[Matching, ...]:
    """Workers whose numbers differ in bit b, for each b; empty unless m is a power of two.

    >>> hypercube_matchings(4)
    (((0, 1), (2, 3)), ((0, 2), (1, 3)))
    """
    if num_workers < 2 or num_workers & (num_workers - 1):
        return ()
    return tuple(
        tuple((i, i ^ 1 << b) for i in range(num_workers) if i < i ^ 1 << b)
        for b in range(num_workers.bit_length() - 1)
    )


def missing_link(topology: Topology, groups: tuple[tuple[Matching, ...], ...]) -> Link | None:
    """A link that rounds need and the topology lacks; None where it has all of them."""
    links = set(topology.links)
    needed = (link for round_ in groups for matching in round_ for link in matching)
    return next((link for link in needed if link not in links), None)


def repeated(
    request: Request,
    groups: tuple[tuple[Matching, ...], ...],
    *,
    alpha: float,
    note: str,
    weights: Shares | None = None,
) -> Plan:
    """The plan that goes through the rounds again and again as its time accrues."""
    timing, colors = request.timing, coloring(request)
    share = simple(Fraction(repr(request.budget)), 10**6)
    rate = share * Fraction(timing.round_time(colors))
    costs = [Fraction(timing.round_time(round_)) for round_ in groups]
    # Repeated until the cycle's time is whole iterations, so that none of the budget is lost.
    once = sum(costs, start=Fraction(0)) / rate
    repeats = min(once.denominator, _MOST_TURNS, max(1, int(LONGEST_CYCLE / once)))
    firsts = list(accumulate((len(round_) for round_ in groups), initial=0))
    places = [tuple(range(firsts[d], firsts[d + 1])) for d in range(len(groups))] * repeats
    turns = timeline(costs * repeats, rate)
    if request.mixing in ("laplacian", "windows"):
        # A group's average is exact alone: one digit an iteration, however large the budget.
        turns = [(wait if n == some[0] else 1, [n]) for wait, some in turns for n in some]
    cycle = unrolled((wait, tuple(j for n in some for j in places[n])) for wait, some in turns)
    return finished(
        request,
        matchings=tuple(matching for round_ in groups for matching in round_),
        schedule=Cycle(cycle=cycle, num_matchings=firsts[-1], seed=request.seed),
        alpha=alpha,
        weights=weights,
        num_colors=len(colors),
        notes=(note,),
    )
