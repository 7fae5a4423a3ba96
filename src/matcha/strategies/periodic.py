"""Periodic decentralized SGD (P-DecenSGD): all links, every 1/C_b iterations."""

from __future__ import annotations

from matcha.mixing import laplacian_extremes, periodic_contraction
from matcha.plans import Plan
from matcha.schedules import Periodic
from matcha.strategies.parts import annotated, coloring, only_laplacian
from matcha.strategies.request import Request


def build(request: Request) -> Plan:
    """Plan a full exchange in a fraction C_b of the iterations, evenly spaced."""
    topology, matchings, budget = request.topology, coloring(request), request.budget
    best = periodic_contraction(topology, budget)
    return annotated(
        Plan(
            topology=topology,
            strategy="periodic",
            budget=budget,
            seed=request.seed,
            mixing=only_laplacian(request),
            matchings=matchings,
            probabilities=(budget,) * len(matchings),
            alpha=best.alpha,
            schedule=Periodic(frequency=budget, num_matchings=len(matchings)),
            timing=request.timing,
            num_colors=len(matchings),
            rho=best.rho,
            algebraic_connectivity=budget * laplacian_extremes(topology.laplacian(), topology)[0],
            expected_comm_time=budget * request.timing.round_time(matchings),
        )
    )
