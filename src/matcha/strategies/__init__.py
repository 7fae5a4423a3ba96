"""Strategies: how a plan is made from a topology and a budget. One registry, one file each."""

from matcha.strategies.finite_time import Base, Ceca, Hypercube, OnePeer
from matcha.strategies.fixed import AllReduce, Local, Periodic, RelaySum, Rounds, Silent, Vanilla
from matcha.strategies.greedy import Greedy
from matcha.strategies.matcha import Matcha, Single
from matcha.strategies.outer import DiLoCo, GASLoC, NoLoCo, SparseLoCo
from matcha.strategies.planning import next_stage, plan, staged_plan, with_events, with_workers
from matcha.strategies.registry import (
    COMPARED,
    OFFERED,
    STRATEGIES,
    as_strategy,
    comparable,
    has_budget,
    is_control,
    make_strategy,
    strategy_named,
    strategy_with,
    with_budget,
)
from matcha.strategies.strategy import (
    EFFORTS,
    Alpha,
    Decomposition,
    Effort,
    Request,
    Strategy,
)

__all__ = [
    "COMPARED",
    "EFFORTS",
    "OFFERED",
    "STRATEGIES",
    "AllReduce",
    "Alpha",
    "Base",
    "Ceca",
    "Decomposition",
    "DiLoCo",
    "Effort",
    "GASLoC",
    "Greedy",
    "Hypercube",
    "Local",
    "Matcha",
    "NoLoCo",
    "OnePeer",
    "Periodic",
    "RelaySum",
    "Request",
    "Rounds",
    "Silent",
    "Single",
    "SparseLoCo",
    "Strategy",
    "Vanilla",
    "as_strategy",
    "comparable",
    "has_budget",
    "is_control",
    "make_strategy",
    "next_stage",
    "plan",
    "staged_plan",
    "strategy_named",
    "strategy_with",
    "with_budget",
    "with_events",
    "with_workers",
]
