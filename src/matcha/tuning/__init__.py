"""Tuning: which strategy, budget and wire bring the average model to a target soonest."""

from matcha.tuning.advice import Advice, AdvisedPoint, advise
from matcha.tuning.points import TunedPoint, Tuning
from matcha.tuning.problem import Problem, floor
from matcha.tuning.search import (
    DEFAULT_BUDGETS,
    DEFAULT_STRATEGIES,
    DEFAULT_WIRES,
    MAX_TRIALS,
    Trials,
    predict,
    small_messages,
    tune,
)

__all__ = [
    "DEFAULT_BUDGETS",
    "DEFAULT_STRATEGIES",
    "DEFAULT_WIRES",
    "MAX_TRIALS",
    "Advice",
    "AdvisedPoint",
    "Problem",
    "Trials",
    "TunedPoint",
    "Tuning",
    "advise",
    "floor",
    "predict",
    "small_messages",
    "tune",
]
