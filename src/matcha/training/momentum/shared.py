"""Shared momentum: first moments are exchanged with the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    agree. Muon's steps are of one size whatever the momentum, and need none.

    Args:
        x: the parameters.
        unbounded: places in a row that Muon steps.
    """

    def __init__(self, x: Tensor, unbounded: Sequence[slice] = ()) -> None:
        self._before = torch.zeros_like(x)
        self._unbounded = unbounded

    def before_step(self, x: Tensor, memory: Mapping[str, Tensor]) -> None:
        """Keep where the worker stands."""
        self._before.copy_(x)

    def after_step(self, x: Tensor, rate: Tensor | float) -> None:
        """Bound the step."""
        limit = torch.as_tensor(rate, dtype=x.dtype, device=x.device).abs()
        step = (x - self._before).clamp_(-limit, limit)
        kept = [x[..., place].clone() for place in self._unbounded]
        torch.add(self._before, step, out=x)
        for place, values in zip(self._unbounded, kept, strict=True):
            x[..., place] = values


def first_moment(memory: Mapping[str, Tensor]) -> Tensor:
    """What `shared` exchanges beside the parameters: Adam's first moment, SGD's momentum."""
    return memory["first"] if "first" in memory else memory["momentum"]
