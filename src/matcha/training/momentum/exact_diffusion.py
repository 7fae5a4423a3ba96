"""Exact diffusion (D²): each step anticipates what rounds keep moving the worker by."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from matcha.plans import PlanLike
from matcha.training.momentum.rule import MomentumRule
from matcha.training.momentum.settings import Momentum

_ROUNDS = 2000
"""Looked at to see what a plan's rounds hold."""
_TRIED = tuple(2.0**-k for k in range(12))
_GONE = 1e-9
"""What is left of a difference that has died out; rounding errors live on below."""


class ExactDiffusion(MomentumRule):
    """Exact diffusion, or D²: no vector beside the parameters is sent.

    y adds up what rounds moved the worker by, y ← y + x − Wx, and each iteration steps along
    −ηu − κy. Where data differ and rounds alone would leave a steady difference, y grows until
    every worker drifts as the average does. The y of all workers cancel, as moves at a meeting do,
    so the average model takes the average step.

    With κ = 1 and the same W in every iteration that is D² (Tang et al., 2018) and exact
    diffusion (Yuan et al., 2018): x ← W(2x − x₋ − η(u − u₋)). Where workers meet rarely, or other
    ones each time, a y is in force for many iterations before a meeting renews it, and κ must be
    below 2 over their number: `stable_correction`.

    Args:
        spec: the share κ.
        x: the parameters.
    """

    def __init__(self, spec: Momentum, x: Tensor) -> None:
        assert spec.correction is not None
        self.share = spec.correction
        self.moved, self._before = torch.zeros_like(x), torch.zeros_like(x)

    def state(self) -> Mapping[str, Tensor]:
        """What rounds moved the worker by."""
        return {"moved": self.moved}

    def reset(self, x: Tensor) -> None:
        """Start again."""
        self.moved.zero_()

    def after_step(self, x: Tensor, rate: Tensor | float) -> None:
        """Anticipate a share of it."""
        x.sub_(self.moved, alpha=self.share)
        self._before.copy_(x)

    def after_skipped_step(self, x: Tensor, rate: Tensor | float) -> None:
        """The same: what rounds do has nothing to do with the step."""
        self.after_step(x, rate)

    def after_round(
        self, x: Tensor, memory: Mapping[str, Tensor], rate: Tensor | float, met: Tensor | None
    ) -> None:
        """Add what this round moved it by."""
        self.moved.add_(self._before).sub_(x)


def stable_correction(plan: PlanLike) -> float:
    """The share κ under which differences between workers die out soonest in a plan's rounds.

    The largest of 1, ½, ¼, … that is about as good as any: found by following a few differences
    through the rounds themselves.

    >>> import matcha
    >>> stable_correction(matcha.plan(matcha.families.complete(8), 1.0, "allreduce"))
    1.0
    >>> stable_correction(matcha.plan(matcha.families.complete(8), 0.1, "hypercube"))
    0.25
    """
    m, columns = plan.num_workers, 2 * len(_TRIED)
    shares = np.repeat(_TRIED, 2)
    x, y = np.random.default_rng(0).normal(size=(2, m, columns))
    x, y = x - x.mean(0), y - y.mean(0)
    size, rounds = np.ones(columns), np.ones(columns)
    for round in islice(plan.rounds(0, _ROUNDS), _ROUNDS):
        lives = (size > _GONE) & (size < 1 / _GONE)
        before = x - shares * y
        mixed = round.mix(before)
        x, y = np.where(lives, mixed, x), np.where(lives, y + before - mixed, y)
        size = np.sqrt((x * x + y * y).sum(0) / m) + 1e-99
        rounds += lives
    speed = (np.log(size) / rounds).reshape(-1, 2).max(1)
    return next(k for k, s in zip(_TRIED, speed, strict=True) if s <= 0.8 * speed.min())
