"""Silence: no communication at all, the control that every measure must tell from training."""

from __future__ import annotations

import math

from matcha.plans import Plan
from matcha.schedules import Cycle
from matcha.strategies.parts import coloring, finished
from matcha.strategies.strategy import Request


def build(request: Request) -> Plan:
    """Plan that nobody ever talks: C_b = 0."""
    matchings = coloring(request)
    return finished(
        request,
        budget=0.0,
        matchings=matchings,
        schedule=Cycle(cycle=((),), num_matchings=len(matchings), seed=request.seed),
        alpha=0.5,
        num_colors=len(matchings),
        figures={"rho": 1.0, "connectivity": 0.0, "consensus_error": math.inf},
        notes=("nobody ever talks: a control, not a way to train.",),
    )
