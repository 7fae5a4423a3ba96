"""Periodic decentralized SGD (P-DecenSGD): all links, every 1/C_b iterations."""

from __future__ import annotations

from matcha.mixing import laplacian_extremes, periodic_contraction
from matcha.plans import Plan
from matcha.schedules import Periodic
from matcha.strategies.parts import coloring, finished
from matcha.strategies.strategy import Request


def build(request: Request) -> Plan:
    """Plan a full exchange in a fraction C_b of the iterations, evenly spaced."""
    topology, matchings, budget = request.topology, coloring(request), request.budget
    best = periodic_contraction(topology, budget)
    connectivity = laplacian_extremes(topology.laplacian(), topology)[0]
    return finished(
        request,
        matchings=matchings,
        schedule=Periodic(frequency=budget, num_matchings=len(matchings), seed=request.seed),
        alpha=best.alpha,
        num_colors=len(matchings),
        figures={"rho": best.rho, "connectivity": budget * connectivity},
    )
