"""Tracking: a second vector follows the workers' average gradient, or their average momentum."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from matcha.training.momentum.rule import MomentumRule
from matcha.training.momentum.settings import Momentum


class Tracking(MomentumRule):
    """Gradient tracking: steps follow the average gradient of all workers, as far as it is known.

    A worker steps along g + (y − a): its own gradient, put right by what it knows of the others'.
    a is a running mean of its own gradients, y follows the average of the workers' means by
    y ← W(y + a − a₋), and is exchanged as x is, so a meeting takes twice the bytes.

    As published, a is the last gradient (`memory=0`): what a meeting then learns holds the noise of
    one batch, and a worker that meets rarely walks along that noise until its next meeting.

    Args:
        spec: what the mean keeps of itself an iteration.
        x: the parameters.
    """

    def __init__(self, spec: Momentum, x: Tensor) -> None:
        self.spec = spec
        self.tracked, self.mean = torch.zeros_like(x), torch.zeros_like(x)
        self.age = torch.zeros((), dtype=x.dtype, device=x.device)

    def state(self) -> Mapping[str, Tensor]:
        """What later meetings depend on."""
        return {"tracked": self.tracked, "mean": self.mean, "age": self.age}

    def reset(self, x: Tensor) -> None:
        """Start again at these values."""
        for tensor in self.state().values():
            tensor.zero_()

    def adjust_gradient(self, gradients: Tensor) -> None:
        """Put the gradients right by what is tracked of their average."""
        self.age.add_(1.0)
        newest = self.age.reciprocal().clamp_(min=1 - self.spec.memory)
        self.tracked.sub_(self.mean)
        self.mean.lerp_(gradients, newest)
        self.tracked.add_(self.mean)
        gradients.add_(self.tracked).sub_(self.mean)


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
