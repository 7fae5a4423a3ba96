"""Loss scaling: with `torch.amp.GradScaler`, a skipped step must still take part in its round.

A scaler leaves out `optimizer.step()` when a gradient overflowed. Overflow is one worker's private
matter, but the round is not: its partner waits. So we ask the scaler to call `step()` always, the
way fused optimizers do, and leave out the update ourselves.
"""

from __future__ import annotations

import torch

__all__ = ["LossScaling"]

_ASK = "_step_supports_amp_scaling"  # how an optimizer tells GradScaler that it handles overflow


class LossScaling:
    """Takes the place of GradScaler's skipping for one optimizer; idle when no scaler is used."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._fused = bool(getattr(optimizer, _ASK, False))  # such a one skips by itself
        self._withheld: list[tuple[torch.Tensor, torch.Tensor]] = []
        if not self._fused:
            setattr(optimizer, _ASK, True)

    def before_step(self) -> None:
        """Unscale the gradients; withhold them from the optimizer when one of them overflowed."""
        optimizer = self._optimizer
        found = getattr(optimizer, "found_inf", None)
        if found is None or self._fused:
            return
        scale = optimizer.grad_scale  # type: ignore[attr-defined]  # None: the script unscaled them
        optimizer.found_inf = optimizer.grad_scale = None  # type: ignore[attr-defined]
        gradients = [
            (p, p.grad) for g in optimizer.param_groups for p in g["params"] if p.grad is not None
        ]
        if found.item():
            self._withheld = gradients
            for parameter, _ in gradients:
                parameter.grad = None  # every optimizer passes over such parameters
        elif scale is not None:
            inverse = scale.double().reciprocal().float()  # as GradScaler computes it
            for _, gradient in gradients:
                gradient.mul_(inverse.to(gradient.device))

    def after_step(self) -> None:
        """Give withheld gradients back."""
        for parameter, gradient in self._withheld:
            parameter.grad = gradient
        self._withheld = []

    def detach(self) -> None:
        """Leave skipping to the scaler again."""
        if not self._fused:
            delattr(self._optimizer, _ASK)
