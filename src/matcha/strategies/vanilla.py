"""Vanilla decentralized SGD: all links at every iteration."""

from __future__ import annotations

from matcha.mixing import laplacian_extremes, vanilla_contraction
from matcha.plans import Plan
from matcha.schedules import Periodic
from matcha.strategies.parts import coloring, finished
from matcha.strategies.strategy import Request


def build(request: Request) -> Plan:
    """Plan a full exchange at every iteration, whatever the budget: C_b = 1."""
    topology, matchings = request.topology, coloring(request)
    best = vanilla_contraction(topology)
    return finished(
        request,
        budget=1.0,
        matchings=matchings,
        schedule=Periodic(frequency=1.0, num_matchings=len(matchings), seed=request.seed),
        alpha=best.alpha,
        num_colors=len(matchings),
        figures={
            "rho": best.rho,
            "connectivity": laplacian_extremes(topology.laplacian(), topology)[0],
        },
    )
