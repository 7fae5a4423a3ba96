"""Steps: the hooks by which one or several optimizers tell that parameters are about to change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from matcha.distributed.hooks.claims import Claim
from matcha.distributed.hooks.loss_scaling import LossScaling

__all__ = ["Steps"]

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Steps:
    """Turns the steps of a model's optimizers into one iteration: begin, change, end.

    An iteration ends when the last of the optimizers has stepped. One that steps more often than
    the others (a GAN's critic) does not make more iterations.

    Args:
        optimizers: whose steps make an iteration; without any, the script calls `take` itself.
        claim: on the parameters they step.
        begin: called when the gradient of an iteration is about to be computed, at the latest when
            it is there; may come several times.
        change: called before the first parameter changes; may come several times.
        end: called when the last optimizer has stepped.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        claim: Claim,
        *,
        begin: Callable[[], None],
        change: Callable[[], None],
        end: Callable[[], None],
    ) -> None:
        self._begin, self._change, self._end = begin, change, end
        self._claim = claim
        self._count = self._missing = len(optimizers)
        self._hooks = [_Hook(optimizer, self) for optimizer in optimizers]
        claim.take()

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments | None:
        """An optimizer begins to step; the arguments, as torch gives them, begin with itself."""
        self._claim.stepping = True
        self._begin()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._change()
            return None
        # The closure computes the gradient: parameters change only when it has returned.
        patient = self._then_change(closure)
        if len(args) > 1:
            return (args[0], patient, *args[2:]), kwargs
        return args, {**kwargs, "closure": patient}

    def _then_change(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def patient() -> Any:
            loss = closure()
            self._change()
            return loss

        return patient

    def after(self, hook: _Hook) -> None:
        """An optimizer has stepped, or was kept from it."""
        self._claim.stepping = False
        if self._count > 1:
            if not hook.stepped:
                hook.stepped = True
                self._missing -= 1
            if self._missing:
                return
            self._missing = self._count
            for other in self._hooks:
                other.stepped = False
        self._end()

    def take(self) -> None:
        """A whole iteration without an optimizer's step."""
        self._begin()
        self._change()
        self._end()

    def skipped(self, hook: _Hook) -> None:
        """An optimizer was kept from stepping."""
        self._begin()
        self._change()
        self.after(hook)

    def restart_curvature(self) -> None:
        """Parameters have jumped: what LBFGS knows of the loss around the old ones is wrong."""
        for hook in self._hooks:
            if isinstance(hook.optimizer, torch.optim.LBFGS):
                hook.optimizer.state.clear()

    def detach(self) -> None:
        """Leave the optimizers and the parameters alone."""
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()
        self._claim.release()


class _Hook:
    """The hooks on one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, steps: Steps) -> None:
        self.stepped = False
        self.optimizer = optimizer
        self._steps = steps
        self._scaling = LossScaling(optimizer, self._skipped)
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        self._scaling.stepped = True
        return self._steps.before(args, kwargs)

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._steps.after(self)

    def _skipped(self) -> None:
        self._steps.skipped(self)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._scaling.detach()
