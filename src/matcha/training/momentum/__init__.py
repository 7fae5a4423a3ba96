"""Momentum that knows about meetings, for either engine.

Local momentum pulls workers apart between meetings. Each remedy here is a few operations around
the optimizer's step and the round that follows it, on flat tensors: all workers' rows in the
simulator, one worker's buckets in the runtime. docs/momentum.md compares them.
"""

from matcha.training.momentum.rules import (
    MomentumRule,
    MomentumTracking,
    Tracking,
    first_moment,
    make_rule,
)
from matcha.training.momentum.settings import (
    MOMENTA,
    Momentum,
    automatic,
    iterations_between_meetings,
    momentum_for,
    parse_momentum,
    resolve_momentum,
    stable_correction,
    stable_follow,
    with_outer,
)

__all__ = [
    "MOMENTA",
    "Momentum",
    "MomentumRule",
    "MomentumTracking",
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
