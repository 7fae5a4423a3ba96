"""Push-sum at one worker: for messages that go one way and are not balanced by others.

The parameters are z = x/ω, at which gradients are taken; x and ω are kept beside them and are what
is exchanged. The definition is `matcha.rounds.PushSum`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from matcha.plans import PlanLike

__all__ = ["PushSumValues", "push_sum_of"]


class PushSumValues:
    """One worker's x and ω.

    Args:
        values: the flat parameters z; x starts from them, and ω from 1.

    Attributes:
        mixed: what messages carry: x, and ω as one more small tensor.
    """

    def __init__(self, values: Sequence[torch.Tensor]) -> None:
        self._values = list(values)
        self._x = [value.clone() for value in values]
        self._omega = torch.ones(1, dtype=torch.float64)
        self.mixed = [*self._x, self._omega]

    @property
    def omega(self) -> float:
        """This worker's weight; all workers' sum to their number."""
        return float(self._omega)

    def state(self) -> Mapping[str, torch.Tensor]:
        """What later rounds depend on: x and ω, without which z cannot go on."""
        return {"omega": self._omega, **{f"x{k}": x for k, x in enumerate(self._x)}}

    def reset(self) -> None:
        """Start again from the current parameters."""
        self._omega.fill_(1.0)
        for x, z in zip(self._x, self._values, strict=True):
            x.copy_(z)

    def __enter__(self) -> None:
        """Before an exchange x takes the steps that z took since the last one."""
        for x, z in zip(self._x, self._values, strict=True):
            x.add_(z - x / self.omega)

    def __exit__(self, *_: object) -> None:
        """After it z is what the exchange made of x and ω."""
        for x, z in zip(self._x, self._values, strict=True):
            torch.div(x, self.omega, out=z)


def push_sum_of(plan: PlanLike, values: Sequence[torch.Tensor]) -> PushSumValues | None:
    """X and ω where the plan's messages do not come round; None where they do, as in most plans."""
    if not any(level.needs_push_sum for level in plan.levels):
        return None
    return PushSumValues(values)
