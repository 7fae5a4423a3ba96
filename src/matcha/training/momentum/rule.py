"""What every momentum rule may do, and local momentum: nothing."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


class MomentumRule:
    """What happens around a step and its round; this one: nothing (local momentum)."""

    acts_without_round = False
    """Whether `after_round` does anything where no worker met another."""

    def state(self) -> Mapping[str, Tensor]:
        """What the next iteration depends on."""
        return {}

    def reset(self, x: Tensor) -> None:
        """Start again at these values."""

    def adjust_gradient(self, gradients: Tensor) -> None:
        """Change the gradients before the optimizer sees them."""

    def before_step(self, x: Tensor, memory: Mapping[str, Tensor]) -> None:
        """The optimizer is about to step, or the round to begin."""

    def after_step(self, x: Tensor, rate: Tensor | float) -> None:
        """Between the step and the round."""

    def after_skipped_step(self, x: Tensor, rate: Tensor | float) -> None:
        """In place of `after_step`, where the optimizer left its step out."""

    def before_round(self, x: Tensor, met: Tensor | None) -> None:
        """Right before the round, after the step. `met`: rows that take part in it; None: all."""

    def after_round(
        self, x: Tensor, memory: Mapping[str, Tensor], rate: Tensor | float, met: Tensor | None
    ) -> None:
        """After both. `met`: which rows took part in the round; None: all."""

    def after_silent_round(
        self, x: Tensor, memory: Mapping[str, Tensor], rate: Tensor | float
    ) -> None:
        """In place of `after_step` and `after_round`, where no partner was to be met."""
