"""Momentum that knows about meetings, for either engine. One registry, one file per rule.

Local momentum pulls workers apart between meetings. Each remedy here is a few operations around
the optimizer's step and the round that follows it, on flat tensors: all workers' rows in the
simulator, one worker's buckets in the runtime. docs/momentum.md compares them.
"""

from matcha.training.momentum.exact_diffusion import ExactDiffusion, stable_correction
from matcha.training.momentum.outer import Outer
from matcha.training.momentum.quasi_global import (
    QuasiGlobal,
    iterations_between_meetings,
    stable_follow,
)
from matcha.training.momentum.registry import (
    automatic,
    make_rule,
    momentum_for,
    resolve_momentum,
    with_outer,
)
from matcha.training.momentum.rule import MomentumRule
from matcha.training.momentum.settings import MOMENTA, Kind, Momentum, parse_momentum
from matcha.training.momentum.shared import Shared, first_moment
from matcha.training.momentum.tracking import MomentumTracking, Tracking

__all__ = [
    "MOMENTA",
    "ExactDiffusion",
    "Kind",
    "Momentum",
    "MomentumRule",
    "MomentumTracking",
    "Outer",
    "QuasiGlobal",
    "Shared",
    "Tracking",
    "automatic",
    "first_moment",
    "iterations_between_meetings",
    "make_rule",
    "momentum_for",
    "parse_momentum",
    "resolve_momentum",
    "stable_correction",
    "stable_follow",
    "with_outer",
]
