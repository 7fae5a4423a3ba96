"""Strategies: how a plan is made from a topology and a budget. One registry, one file each."""

from matcha.strategies.planning import plan
from matcha.strategies.registry import (
    COMPARED,
    OFFERED,
    STRATEGIES,
    Strategy,
    has_budget,
    is_control,
    look_of,
    strategy_named,
    with_budget,
)
from matcha.strategies.request import DECOMPOSITIONS, EFFORTS, Decomposition, Effort, Request
from matcha.strategies.staged import next_stage, staged_plan

__all__ = [
    "COMPARED",
    "DECOMPOSITIONS",
    "EFFORTS",
    "OFFERED",
    "STRATEGIES",
    "Decomposition",
    "Effort",
    "Request",
    "Strategy",
    "has_budget",
    "is_control",
    "look_of",
    "next_stage",
    "plan",
    "staged_plan",
    "strategy_named",
    "with_budget",
]
