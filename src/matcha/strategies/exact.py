"""Exact averages: `allreduce` after every iteration, `local` every H-th one (local SGD).

What people run today, as strategies like others: an all-reduce costs what a ring takes on these
links, and `local` averages as often as the budget allows.
"""

from __future__ import annotations

import math
from fractions import Fraction

from matcha.plans import Plan
from matcha.schedules import Cycle
from matcha.strategies.pacing import unrolled
from matcha.strategies.parts import coloring, finished
from matcha.strategies.strategy import Request
from matcha.timing import all_reduce_time


def allreduce(request: Request) -> Plan:
    """Plan an exact average after every iteration, whatever the budget."""
    return _every(request, 1)


def local(request: Request) -> Plan:
    """Plan an exact average every H iterations, for the smallest H that the budget allows."""
    full = request.timing.round_time(coloring(request))
    once = all_reduce_time(request.timing, request.topology)
    # In exact numbers: of the smallest budgets a float would be 0, or the quotient infinite.
    ratio = Fraction(once) / (Fraction(request.budget) * Fraction(full))
    return _every(request, max(1, math.ceil(ratio - Fraction(1, 10**9))))


def _every(request: Request, period: int) -> Plan:
    m, matchings = request.topology.num_workers, coloring(request)
    full = request.timing.round_time(matchings)
    cycle = unrolled([(period, tuple(range(len(matchings))))])
    spent = all_reduce_time(request.timing, request.topology) / (period * full)
    note = f"an exact average every {period} iterations." if period > 1 else None
    return finished(
        request,
        budget=request.budget if request.strategy == "local" else min(1.0, spent),
        matchings=matchings,
        schedule=Cycle(cycle=cycle, num_matchings=len(matchings), seed=request.seed),
        alpha=1 / m,
        num_colors=len(matchings),
        figures={
            "rho": 1 - 1 / period,
            # Disagreement grows by (m − 1)/m an iteration and is gone after an average.
            "consensus_error": (period - 1) / 2 * (m - 1) / m,
        },
        notes=() if note is None else (note,),
    )
