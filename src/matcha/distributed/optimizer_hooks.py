"""Hooks on one or several optimizers: they turn steps into iterations of the plan."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch

from matcha.distributed.ownership import ParameterOwnership, wrapped_by
from matcha.errors import InputError

__all__ = ["OptimizerHooks"]

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_SCALED_STEP = torch.amp.GradScaler.step.__code__


class OptimizerHooks:
    """Turns the steps of a model's optimizers into iterations: begin, change, end.

    An iteration holds at most one step of each optimizer, so that between two rounds no parameter
    is stepped twice. It ends once all optimizers have stepped, or when one is about to step again
    (a GAN's critic): then the round comes between that step's gradient and the step itself.

    A `GradScaler` leaves out `optimizer.step()` when a gradient overflowed. Overflow concerns one
    worker alone, but the round does not: its partner waits. No hook tells of it, so `step` of the
    given scaler, and of no other, is wrapped; the scaler's decisions stay its own.

    Args:
        optimizers: whose steps make iterations; without any, the script calls `take` itself.
        ownership: of the parameters they step.
        begin: called when the gradient of an iteration is about to be computed, at the latest when
            it is there; may come several times.
        change: called before an optimizer changes its parameters, with that optimizer; with None
            where an iteration ends without a step.
        end: called at the end of each iteration.
        scaler: through which the optimizers step.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        ownership: ParameterOwnership,
        *,
        begin: Callable[[], None],
        change: Callable[[torch.optim.Optimizer | None], None],
        end: Callable[[], None],
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self._begin, self._change, self._end = begin, change, end
        self._ownership = ownership
        self._hooks = [_Hook(optimizer, self) for optimizer in optimizers]
        self._missing = len(self._hooks)
        self._unwatch = None if scaler is None else _watch(scaler, self)
        ownership.take()

    @property
    def stepped(self) -> list[int]:
        """Which optimizers have stepped in the iteration under way."""
        return [k for k, hook in enumerate(self._hooks) if hook.has_stepped]

    @stepped.setter
    def stepped(self, indices: Sequence[int]) -> None:
        for k, hook in enumerate(self._hooks):
            hook.has_stepped = k in indices
        self._missing = len(self._hooks) - len(indices)

    def before(
        self, hook: _Hook, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Arguments | None:
        """An optimizer begins to step; the arguments, as torch gives them, begin with itself."""
        self._prepare(hook)
        self._ownership.is_stepping = True
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._change(hook.optimizer)
            return None

        # The closure computes the gradient: parameters change only when it has returned.
        def then_change() -> Any:
            loss = closure()
            self._change(hook.optimizer)
            return loss

        if len(args) > 1:
            return (args[0], then_change, *args[2:]), kwargs
        return args, {**kwargs, "closure": then_change}

    def _prepare(self, hook: _Hook) -> None:
        self._begin()
        if hook.has_stepped:
            self._finish()

    def after(self, hook: _Hook) -> None:
        """An optimizer has stepped, or was kept from it."""
        self._ownership.is_stepping = False
        hook.has_stepped = True
        self._missing -= 1
        if not self._missing:
            self._finish()

    def skipped(self, hook: _Hook) -> None:
        """An optimizer was kept from stepping."""
        self._prepare(hook)
        self._change(None)
        self.after(hook)

    def take(self) -> None:
        """End an iteration without an optimizer's step."""
        self._begin()
        self._change(None)
        self._finish()

    def _finish(self) -> None:
        self._missing = len(self._hooks)
        for hook in self._hooks:
            hook.has_stepped = False
        self._end()

    def scaled_step(self, step: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Step by a scaler, and notice when it leaves the optimizer's step out."""
        inside = optimizer
        while inside is not None:
            for hook in self._hooks:
                if hook.optimizer is inside:
                    hook.was_called = False
                    result = step(optimizer, *args, **kwargs)
                    if not hook.was_called:
                        self.skipped(hook)
                    return result
            inside = wrapped_by(inside)
        return step(optimizer, *args, **kwargs)

    @property
    def knows_scaler(self) -> bool:
        """Whether a scaler was given, so that steps it leaves out are noticed."""
        return self._unwatch is not None

    def restart_curvature(self) -> None:
        """Forget what LBFGS knows of the loss around parameters that have jumped since."""
        for hook in self._hooks:
            if isinstance(hook.optimizer, torch.optim.LBFGS):
                hook.optimizer.state.clear()

    def detach(self) -> None:
        """Leave the optimizers, the scaler and the parameters alone."""
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()
        if self._unwatch is not None:
            self._unwatch()
        self._ownership.release()


class _Hook:
    """The hooks on one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, hooks: OptimizerHooks) -> None:
        self.optimizer = optimizer
        self.has_stepped = False
        """In the iteration under way."""
        self.was_called = False
        self._is_checked = False
        self._num_groups = len(optimizer.param_groups)
        self._hooks = hooks
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        self.was_called = True
        if not self._is_checked:
            self._is_checked = True
            if not self._hooks.knows_scaler:
                _refuse_unknown_scaler(optimizer)
        if len(optimizer.param_groups) != self._num_groups:
            _refuse_added(optimizer, self._num_groups)
        return self._hooks.before(self, args, kwargs)

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._hooks.after(self)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _watch(scaler: torch.amp.GradScaler, hooks: OptimizerHooks) -> Callable[[], None]:
    """Wrap the `step` of one scaler; returns what undoes it."""
    original: Any = scaler.step
    before = vars(scaler).get("step")
    watching = weakref.ref(hooks)  # the scaler must not keep a Gossip alive

    def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        found = watching()
        if found is None:
            return original(optimizer, *args, **kwargs)
        return found.scaled_step(original, optimizer, *args, **kwargs)

    scaler.step = step  # type: ignore[method-assign]

    def unwatch() -> None:
        if vars(scaler).get("step") is step:  # another Gossip may have wrapped it since
            del vars(scaler)["step"]
            if before is not None:
                scaler.step = before  # type: ignore[method-assign]

    return unwatch


def _refuse_added(optimizer: torch.optim.Optimizer, count: int) -> None:
    added = [p for group in optimizer.param_groups[count:] for p in group["params"]]
    shapes = ", ".join(str(tuple(parameter.shape)) for parameter in added[:3])
    raise InputError(
        f"parameters were added to {type(optimizer).__name__} after Gossip was constructed (shapes "
        f"{shapes}), so they are not exchanged: call detach() and construct Gossip again."
    )


def _refuse_unknown_scaler(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a step that comes through a GradScaler that Gossip was not given.

    Fused optimizers are stepped at every overflow too, and skip it by themselves.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _SCALED_STEP and frame.f_locals["self"].is_enabled():
            raise InputError(
                "the optimizer steps through a GradScaler that Gossip does not know. A step that "
                "the scaler leaves out must still take part in its round, so give it to Gossip: "
                "Gossip(..., scaler=scaler)."
            )
        frame = frame.f_back
