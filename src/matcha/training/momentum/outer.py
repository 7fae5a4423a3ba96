"""The outer step: at a meeting, a step of its own from an anchor towards the mean."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from matcha.training.momentum.rule import MomentumRule
from matcha.training.momentum.settings import Momentum


class Outer(MomentumRule):
    """At a meeting, a step of its own from an anchor towards the mean.

    v ← βv + α(x̄ − φ), φ ← φ + v, x ← φ, for those who met; x̄ is what the round made of x. With
    `nesterov`, φ ← φ + α(x̄ − φ) + βv with the new v. After an exact average that is DiLoCo's outer
    step; after a meeting of two, NoLoCo's (with its γ equal to α, as in its authors' code).

    With `rate_first` workers exchange y = φ + α(x − φ) and step from ȳ: φ ← ȳ + β(ȳ − ȳ₋), where ȳ₋
    is what the round before made (GASLoC). ȳ − ȳ₋ is v, so it is the same code with α = 1.
    """

    def __init__(self, spec: Momentum, x: Tensor) -> None:
        self.spec = spec
        self.anchor, self.velocity = x.clone(), torch.zeros_like(x)

    def state(self) -> Mapping[str, Tensor]:
        """What later meetings depend on."""
        return {"anchor": self.anchor, "velocity": self.velocity}

    def reset(self, x: Tensor) -> None:
        """Start again at these values."""
        self.anchor.copy_(x)
        self.velocity.zero_()

    def before_round(self, x: Tensor, met: Tensor | None) -> None:
        """Go α of the way from the anchor, where that is to be done before the round."""
        if self.spec.rate_first:
            moved = torch.lerp(self.anchor, x, self.spec.outer_rate)
            x.copy_(moved if met is None else torch.where(met, moved, x))

    def after_round(
        self, x: Tensor, memory: Mapping[str, Tensor], rate: Tensor | float, met: Tensor | None
    ) -> None:
        """Take the outer step."""
        alpha, beta = self.spec.outer_rate, self.spec.outer_momentum
        if self.spec.rate_first:
            alpha = 1.0
        velocity = self.velocity * beta
        velocity.add_(x, alpha=alpha)
        velocity.sub_(self.anchor, alpha=alpha)
        moved = self.anchor + velocity
        if self.spec.nesterov:  # α(x̄ − φ) + βv, where v holds α(x̄ − φ) once already
            moved.sub_(self.velocity, alpha=beta).add_(velocity, alpha=beta)
        anchor = moved
        if met is not None:
            velocity = torch.where(met, velocity, self.velocity)
            anchor = torch.where(met, moved, self.anchor)
            moved = torch.where(met, moved, x)
        self.velocity.copy_(velocity)
        self.anchor.copy_(anchor)
        x.copy_(moved)
