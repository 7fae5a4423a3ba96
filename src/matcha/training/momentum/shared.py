"""Shared momentum: first moments are exchanged with the parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from matcha.training.momentum.rule import MomentumRule


class Shared(MomentumRule):
    """First moments are exchanged with the parameters, and no coordinate moves beyond the rate.

    Local Adam divides each worker's first moment by a second moment that holds this worker's own
    noise, so the average of the workers moves too slowly where gradients are noisy or rare. With
    first moments averaged, a worker whose own gradients say nothing of a coordinate moves along
    what others saw. Its second moment is near zero there, and the quotient could be anything:
    without a bound training diverges. The bound is η, the step of a coordinate whose gradients all
    agree.

    Args:
        x: the parameters.
    """

    def __init__(self, x: Tensor) -> None:
        self._before = torch.zeros_like(x)

    def before_step(self, x: Tensor, memory: Mapping[str, Tensor]) -> None:
        """Keep where the worker stands."""
        self._before.copy_(x)

    def after_step(self, x: Tensor, rate: Tensor | float) -> None:
        """Bound the step."""
        limit = torch.as_tensor(rate, dtype=x.dtype, device=x.device).abs()
        step = (x - self._before).clamp_(-limit, limit)
        torch.add(self._before, step, out=x)


def first_moment(memory: Mapping[str, Tensor]) -> Tensor:
    """What `shared` exchanges beside the parameters: Adam's first moment, SGD's momentum."""
    return memory["first"] if "first" in memory else memory["momentum"]
