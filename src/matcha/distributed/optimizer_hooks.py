"""Hooks on one or several optimizers: they turn steps into iterations of the plan.

What happens in an iteration is `OptimizerHooks.begin`, `change` and `end_iteration`.
"""

from __future__ import annotations

import gc
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any
from weakref import ReferenceType, WeakSet, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from matcha.distributed.elastic.growth import Growth
from matcha.distributed.elastic.membership import Membership
from matcha.distributed.options import wrapped_by
from matcha.distributed.worker_state import WorkerState
from matcha.errors import InputError

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_SCALED_STEP = torch.amp.GradScaler.step.__code__


@dataclass(slots=True, kw_only=True)
class _Hooked:
    """One optimizer."""

    index: int
    optimizer: torch.optim.Optimizer
    known: frozenset[int]
    """Its parameters when Gossip was constructed, by `id`."""
    was_called: bool = False
    """In the scaler's step under way."""
    is_checked: bool = False


class OptimizerHooks:
    """Turns the steps of a model's optimizers into iterations.

    An iteration holds at most one step of each optimizer, so that between two rounds no parameter
    is stepped twice. It ends once all optimizers have stepped, or when one is about to step again
    (a GAN's critic): then the round comes between that step's gradient and the step itself.

    A `GradScaler` leaves out `optimizer.step()` when a gradient overflowed. Overflow concerns one
    worker alone, but the round does not: its partner waits. No hook tells of it, so `step` of the
    given scaler, and of no other, is wrapped; the scaler's decisions stay its own.

    Args:
        state: of the worker; without optimizers, the script calls `take` itself.
        ownership: of the parameters that they step.
        scaler: through which the optimizers step.

    Attributes:
        membership: where workers may come and go.
        growth: where they may join, and leave for good.
    """

    def __init__(
        self,
        state: WorkerState,
        ownership: ParameterOwnership,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self._state, self._ownership = state, ownership
        self.membership: Membership | None = None
        self.growth: Growth | None = None
        self._is_checked = False
        self._hooked = {
            id(o): _Hooked(index=k, optimizer=o, known=frozenset(map(id, _parameters(o))))
            for k, o in enumerate(state.optimizers)
        }
        self._handles = [o.register_step_pre_hook(self._before) for o in state.optimizers]
        self._handles += [o.register_step_post_hook(self._after) for o in state.optimizers]
        self._unwatch = None if scaler is None else _watch(scaler, self)
        ownership.take()

    # -- an iteration -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Start an iteration: its gradient is about to be computed, or there. May come again."""
        if self._state.averaging.is_open:
            raise InputError(
                "a step inside averaged() would be lost when the workers' own values come back: "
                "leave the with statement first."
            )
        self._state.begin_round()

    def change(self, optimizer: torch.optim.Optimizer | None) -> None:
        """An optimizer is about to change its parameters; None: an iteration without a step."""
        state = self._state
        if not self._is_checked:  # a wrapper may have come after us, so not at construction
            _check_parallel(state.modules, group_size=state.placement.num_parts)
            self._is_checked = True
        state.stopwatch.end_computing(state.iteration)
        state.finish_overlap()
        if state.weight != 1.0 and optimizer is not None:
            gradients = [p.grad for p in _parameters(optimizer) if p.grad is not None]
            torch._foreach_mul_(gradients, state.weight)
        if state.momentum.is_needed and optimizer is not None:
            state.momentum.before_step(optimizer, meets=bool(state.cursor.met))

    def end_iteration(self) -> None:
        """Mix, advance in the plan, and start what runs beside the next gradient."""
        state = self._state
        state.stepped.clear()
        meets = bool(state.cursor.met)
        if state.momentum.is_needed:
            state.momentum.after_step(meets=meets)
            if meets:
                state.momentum.before_round()
        if state.mix():
            self._restart_curvature()
        if state.momentum.is_needed:
            state.momentum.after_round(met=meets and state.has_met)
        state.cursor.advance()
        state.note_pace()
        if self.membership is not None:
            self.membership.tend()
        state.follow_network()
        if self.growth is not None:
            self.growth.look()
            if self.growth.has_left:
                return self.detach()
        self.begin()
        state.stopwatch.restart()

    def take(self) -> None:
        """Take part in an iteration without an optimizer's step."""
        self.begin()
        self.change(None)
        self.end_iteration()

    # -- what optimizers and the scaler tell ------------------------------------------------------

    def _before(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Arguments | None:
        """An optimizer begins to step; the arguments, as torch gives them, begin with itself."""
        hooked = self._hooked[id(optimizer)]
        hooked.was_called = True
        if not hooked.is_checked:
            hooked.is_checked = True
            if self._unwatch is None:
                _refuse_unknown_scaler(optimizer)
        if sum(len(group["params"]) for group in optimizer.param_groups) > len(hooked.known):
            _refuse_added(optimizer, hooked.known)
        self._prepare(hooked)
        self._ownership.is_stepping = True
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self.change(optimizer)
            return None

        # The closure computes the gradient: parameters change only when it has returned.
        def then_change() -> Any:
            loss = closure()
            self.change(optimizer)
            return loss

        if len(args) > 1:
            return (args[0], then_change, *args[2:]), kwargs
        return args, {**kwargs, "closure": then_change}

    def _prepare(self, hooked: _Hooked) -> None:
        self.begin()
        if hooked.index in self._state.stepped:
            self.end_iteration()

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer has stepped, or was kept from it."""
        self._ownership.is_stepping = False
        stepped = self._state.stepped
        stepped.add(self._hooked[id(optimizer)].index)
        if len(stepped) == len(self._hooked):
            self.end_iteration()

    def scaled_step(self, step: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Step by a scaler, and notice when it leaves the optimizer's step out."""
        inside = optimizer
        while inside is not None and id(inside) not in self._hooked:
            inside = wrapped_by(inside)
        if inside is None:
            return step(optimizer, *args, **kwargs)
        hooked = self._hooked[id(inside)]
        hooked.was_called = False
        result = step(optimizer, *args, **kwargs)
        if not hooked.was_called:
            self._prepare(hooked)
            self.change(None)
            self._after(hooked.optimizer, (), {})
        return result

    def _restart_curvature(self) -> None:
        """Forget what LBFGS knows of the loss around parameters that have jumped since."""
        for optimizer in self._state.optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                optimizer.state.clear()

    def detach(self) -> None:
        """Leave the optimizers, the scaler and the parameters alone."""
        for handle in self._handles:
            handle.remove()
        self._hooked = {}  # another Gossip's wrapper of the scaler may still call this one
        if self._unwatch is not None:
            self._unwatch()
        self._ownership.release()


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


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _refuse_added(optimizer: torch.optim.Optimizer, known: frozenset[int]) -> None:
    added = [p for p in _parameters(optimizer) if id(p) not in known]
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


# -- ownership -------------------------------------------------------------------------------------


class ParameterOwnership:
    """One Gossip's ownership of the parameters it exchanges, and of the optimizers that step them.

    An optimizer constructed after Gossip is an object that Gossip has never seen, and would train
    without a single exchange. PyTorch offers one place to notice it, a hook on the steps of all
    optimizers; it stands only while a Gossip with optimizers does, and changes nothing.

    Args:
        parameters: by name; no other Gossip may own them.
        optimizers: the only ones that may step them; with none, anything may change them.

    Attributes:
        optimizers: as given.
        is_stepping: whether one of the optimizers is in its step, in which it may call others.

    Raises:
        InputError: another Gossip owns a parameter.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        self.is_stepping = False
        self._parameters = list(parameters.values())
        self.optimizers = list(optimizers)
        for name, parameter in parameters.items():
            if _owner(parameter) is not None:
                gc.collect()  # a Gossip that is no longer referenced owns nothing
            if _owner(parameter) is not None:
                raise InputError(
                    f"parameter {name!r} already belongs to another Gossip: use that one, or call "
                    "its detach() before you construct a new one."
                )

    def take(self) -> None:
        """Own the parameters from now on."""
        for parameter in self._parameters:
            _owners[parameter] = ref(self)
        _known.update(self.optimizers)
        _harmless.clear()
        _watch_optimizers()

    def release(self) -> None:
        """Give the parameters up."""
        for parameter in self._parameters:
            _owners.pop(parameter, None)
        for optimizer in self.optimizers:
            _known.discard(optimizer)
        _watch_optimizers()


_owners: Any = WeakTensorKeyDictionary()  # parameter -> reference to its ParameterOwnership
_known: WeakSet[torch.optim.Optimizer] = WeakSet()
_harmless: WeakSet[torch.optim.Optimizer] = WeakSet()  # checked since parameters were last taken
_watching: list[Any] = []  # the hook's handle, while it stands


def _owner(parameter: torch.Tensor) -> ParameterOwnership | None:
    found: ReferenceType[ParameterOwnership] | None = _owners.get(parameter)
    return found() if found is not None else None


def _watch_optimizers() -> None:
    if _known and not _watching:
        _watching.append(register_optimizer_step_pre_hook(_before_any_step))
    elif not _known and _watching:
        _watching.pop().remove()


def _before_any_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _known or optimizer in _harmless:
        return
    if wrapped_by(optimizer) in _known:
        return
    owners = [owner for owner in map(_owner, _parameters(optimizer)) if owner is not None]
    if any(owner.optimizers and not owner.is_stepping for owner in owners):
        raise InputError(
            f"an optimizer that Gossip does not know ({type(optimizer).__name__}) steps the "
            "parameters that Gossip exchanges: construct Gossip after the optimizer, and give it "
            "all that step this model: Gossip(model, [first, second], plan)."
        )
    if not owners:
        _harmless.add(optimizer)


# -- misuse ----------------------------------------------------------------------------------------


def check_stepped(modules: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse optimizers of other parameters than the modules'; warn of those never stepped."""
    stepped = {id(p): (p, o) for o in optimizers for p in _parameters(o)}
    own = {id(p) for p in modules.parameters()}
    for optimizer in optimizers:
        if not any(id(p) in own for p in _parameters(optimizer)):
            raise InputError(
                "the optimizer steps none of the model's parameters: give it this model's."
            )
    others = [(p, o) for key, (p, o) in stepped.items() if key not in own]
    if others:
        parameter, optimizer = others[0]
        count = f"{len(others)} parameters" if len(others) > 1 else "a parameter"
        raise InputError(
            f"{type(optimizer).__name__} steps {count} that the model does "
            f"not hold, the first of shape {tuple(parameter.shape)}, so no other worker would see "
            "what they learn: give Gossip their modules too, Gossip(..., also=[criterion]), or "
            "also=[nn.ParameterList([temperature])]."
        )
    forgotten = [
        n for n, p in modules.named_parameters() if p.requires_grad and id(p) not in stepped
    ]
    if forgotten and optimizers:
        more = f" and {len(forgotten) - 1} more" if len(forgotten) > 1 else ""
        warnings.warn(
            f"no optimizer of this Gossip steps {forgotten[0]!r}{more}: give it all optimizers, "
            "Gossip(model, [first, second], plan), or freeze what does not train.",
            stacklevel=3,
        )


def _check_parallel(model: nn.Module, group_size: int) -> None:
    """Refuse a model that DistributedDataParallel averages beyond the group that is one worker.

    DDP leaves no mark on a model or its parameters, and may wrap it after Gossip is constructed, so
    the objects of the process are searched, once, at the first step.
    """
    if not dist.is_available() or not dist.is_initialized():
        return
    first = next(model.parameters())
    for found in gc.get_objects():
        # By its type: asking lazy objects for their class would load them.
        if issubclass(type(found), DistributedDataParallel):
            inside = any(p is first for p in found.parameters())
            if inside and found.process_group.size() != group_size:
                raise InputError(
                    "the model is inside DistributedDataParallel, which makes all workers' "
                    "gradients equal: leave that out; Gossip takes its place. (For groups of GPUs "
                    "as workers see mesh=.)"
                )
