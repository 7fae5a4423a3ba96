"""Strategies: how a plan is made from a topology and a budget. One file each."""

from matcha.strategies.planning import plan
from matcha.strategies.request import (
    DECOMPOSITIONS,
    EFFORTS,
    MIXINGS,
    STRATEGIES,
    Decomposition,
    Effort,
    Request,
)
from matcha.strategies.staged import staged_plan

__all__ = [
    "DECOMPOSITIONS",
    "EFFORTS",
    "MIXINGS",
    "STRATEGIES",
    "Decomposition",
    "Effort",
    "Request",
    "plan",
    "staged_plan",
]
