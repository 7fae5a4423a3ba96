"""Vanilla decentralized SGD: all links at every iteration."""

from __future__ import annotations

from matcha.mixing import laplacian_extremes, vanilla_contraction
from matcha.plans import Plan
from matcha.schedules import Periodic
from matcha.strategies.parts import annotated, coloring, only_laplacian
from matcha.strategies.request import Request


def build(request: Request) -> Plan:
    """Plan a full exchange at every iteration, whatever the budget: C_b = 1."""
    topology, matchings = request.topology, coloring(request)
    best = vanilla_contraction(topology)
    return annotated(
        Plan(
            topology=topology,
            strategy="vanilla",
            budget=1.0,
            seed=request.seed,
            mixing=only_laplacian(request),
            matchings=matchings,
            probabilities=(1.0,) * len(matchings),
            alpha=best.alpha,
            schedule=Periodic(frequency=1.0, num_matchings=len(matchings)),
            timing=request.timing,
            num_colors=len(matchings),
            rho=best.rho,
            algebraic_connectivity=laplacian_extremes(topology.laplacian(), topology)[0],
            expected_comm_time=request.timing.round_time(matchings),
        )
    )
