"""Momentum tracking: a second vector follows the average of all workers' momentum."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from matcha.training.momentum.rule import MomentumRule


class MomentumTracking(MomentumRule):
    """Steps follow the average momentum of all workers, as far as it is known.

    u is the direction in which the optimizer stepped. The worker steps along u + (y − u₋) instead,
    and y ← W(y + u − u₋) is exchanged as x is: Momentum Tracking (Takezawa et al., 2022) where u is
    the buffer of SGD with momentum.

    Args:
        x: the parameters.
    """

    def __init__(self, x: Tensor) -> None:
        self.tracked, self.last = torch.zeros_like(x), torch.zeros_like(x)
        self._before = torch.zeros_like(x)

    def state(self) -> Mapping[str, Tensor]:
        """What later iterations depend on."""
        return {"tracked": self.tracked, "last": self.last}

    def reset(self, x: Tensor) -> None:
        """Start again."""
        self.tracked.zero_()
        self.last.zero_()

    def before_step(self, x: Tensor, memory: Mapping[str, Tensor]) -> None:
        """Keep where the worker stands."""
        self._before.copy_(x)

    def after_step(self, x: Tensor, rate: Tensor | float) -> None:
        """Correct the step by what is tracked; a step at a rate of 0 tells nothing."""
        rate = torch.as_tensor(rate, dtype=x.dtype, device=x.device)
        newest = (self._before - x) / rate.clamp(min=torch.finfo(x.dtype).tiny)
        newest = torch.where(rate > 0, newest, self.last)
        self.after_skipped_step(x, rate)
        self.tracked.add_(newest).sub_(self.last)
        self.last.copy_(newest)

    def after_skipped_step(self, x: Tensor, rate: Tensor | float) -> None:
        """Correct by what was tracked before: the corrections of all workers cancel."""
        x.sub_((self.tracked - self.last).mul_(rate))
