"""Hooks on one or several optimizers: they turn steps into iterations of the plan.

What happens in an iteration is `OptimizerHooks.begin`, `change` and `end_iteration`.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
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


class OptimizerHooks:
    """Turns the steps of a model's optimizers into iterations; owns the model's parameters.

    An iteration holds at most one step of each optimizer, so that between two rounds no parameter
    is stepped twice. It ends once all optimizers have stepped, or when one is about to step again
    (a GAN's critic): then the round comes between that step's gradient and the step itself.
    Without optimizers the script calls `take` itself.

    A `GradScaler` leaves out `optimizer.step()` when a gradient overflowed. Overflow concerns one
    worker alone, but the round does not: its partner waits. No hook tells of it, so `step` of the
    given scaler, and of no other, is wrapped; the scaler's decisions stay its own.
    """

    def __init__(
        self,
        state: WorkerState,
        scaler: torch.amp.GradScaler | None,
        membership: Membership | None,
        growth: Growth | None,
    ) -> None:
        self._state, self._membership, self._growth = state, membership, growth
        self._is_checked = False
        self._seen: set[int] = set()  # optimizers whose first step has been checked
        self._called: set[int] = set()  # optimizers that have begun a step since it was cleared
        self.is_stepping = False  # in which one of the optimizers may call others
        self._known = {id(o): frozenset(map(id, parameters_of(o))) for o in state.optimizers}
        self._handles = [o.register_step_pre_hook(self._before) for o in state.optimizers]
        self._handles += [o.register_step_post_hook(self._after) for o in state.optimizers]
        self._unwatch = None if scaler is None else _watch(scaler, self)
        self._own(p for p in state.modules.parameters() if p.requires_grad)

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
        if optimizer is None:
            return
        if state.weight != 1.0:
            gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
            torch._foreach_mul_(gradients, state.weight)
        if state.momentum.is_needed:
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
        if self._membership is not None:
            self._membership.tend()
        state.follow_network()
        if self._growth is not None:
            self._growth.look()
            if self._growth.has_left:
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
        known = self._known[id(optimizer)]
        self._called.add(id(optimizer))
        if id(optimizer) not in self._seen:
            self._seen.add(id(optimizer))
            if self._unwatch is None:
                _refuse_unknown_scaler(optimizer)
        if sum(len(group["params"]) for group in optimizer.param_groups) > len(known):
            _refuse_added(optimizer, known)
        self._prepare(optimizer)
        self.is_stepping = True
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

    def _prepare(self, optimizer: torch.optim.Optimizer) -> None:
        self.begin()
        if self._number(optimizer) in self._state.stepped:
            self.end_iteration()

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer has stepped, or was kept from it."""
        self.is_stepping = False
        stepped = self._state.stepped
        stepped.add(self._number(optimizer))
        if len(stepped) == len(self._known):
            self.end_iteration()

    def _number(self, optimizer: torch.optim.Optimizer) -> int:
        return list(self._known).index(id(optimizer))

    def scaled_step(self, step: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Step by a scaler, and notice when it leaves the optimizer's step out."""
        inside = optimizer
        while inside is not None and id(inside) not in self._known:
            inside = wrapped_by(inside)
        self._called.discard(id(inside))
        result = step(optimizer, *args, **kwargs)
        if inside is not None and id(inside) not in self._called:
            self._prepare(inside)
            self.change(None)
            self._after(inside, (), {})
        return result

    def _restart_curvature(self) -> None:
        """Forget what LBFGS knows of the loss around parameters that have jumped since."""
        for optimizer in self._state.optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                optimizer.state.clear()

    # -- whose the parameters are -----------------------------------------------------------------

    def _own(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        for parameter in self._parameters:
            _owners[parameter] = ref(self)
        _known.update(self._state.optimizers)
        _harmless.clear()
        _watch_optimizers()

    def minds(self) -> bool:
        """Whether no other optimizer may step the parameters now."""
        return bool(self._state.optimizers) and not self.is_stepping

    def detach(self) -> None:
        """Leave the optimizers, the scaler and the parameters alone."""
        for handle in self._handles:
            handle.remove()
        self._known = {}  # another Gossip's wrapper of the scaler may still call this one
        if self._unwatch is not None:
            self._unwatch()
        for parameter in self._parameters:
            _owners.pop(parameter, None)
        for optimizer in self._state.optimizers:
            _known.discard(optimizer)
        _watch_optimizers()


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All that an optimizer steps."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _watch(scaler: torch.amp.GradScaler, hooks: OptimizerHooks) -> Callable[[], None]:
    """Wrap the `step` of one scaler; returns what undoes it."""
    original: Any = scaler.step
    before = vars(scaler).get("step")
    watching = ref(hooks)  # the scaler must not keep a Gossip alive

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


# An optimizer constructed after Gossip is an object that Gossip has never seen, and would train
# without a single exchange. PyTorch offers one place to notice it, a hook on the steps of all
# optimizers; it stands only while a Gossip with optimizers does, and changes nothing.
_owners: Any = WeakTensorKeyDictionary()  # parameter -> reference to its OptimizerHooks
_known: WeakSet[torch.optim.Optimizer] = WeakSet()
_harmless: WeakSet[torch.optim.Optimizer] = WeakSet()  # checked since parameters were last taken
_watching: list[Any] = []  # the hook's handle, while it stands


def _owner(parameter: torch.Tensor) -> OptimizerHooks | None:
    found: ReferenceType[OptimizerHooks] | None = _owners.get(parameter)
    return found() if found is not None else None


def _watch_optimizers() -> None:
    if _known and not _watching:
        _watching.append(register_optimizer_step_pre_hook(_before_any_step))
    elif not _known and _watching:
        _watching.pop().remove()


def _before_any_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _known or optimizer in _harmless or wrapped_by(optimizer) in _known:
        return
    owners = [owner for owner in map(_owner, parameters_of(optimizer)) if owner is not None]
    if any(owner.minds() for owner in owners):
        raise InputError(
            f"an optimizer that Gossip does not know ({type(optimizer).__name__}) steps the "
            "parameters that Gossip exchanges: construct Gossip after the optimizer, and give it "
            "all that step this model: Gossip(model, [first, second], plan)."
        )
    if not owners:
        _harmless.add(optimizer)


# -- misuse ----------------------------------------------------------------------------------------


def check_free(modules: nn.Module) -> None:
    """Refuse parameters that another Gossip exchanges."""
    for name, parameter in modules.named_parameters():
        if parameter.requires_grad and _owner(parameter) is not None:
            gc.collect()  # a Gossip that is no longer referenced owns nothing
            if _owner(parameter) is not None:
                raise InputError(
                    f"parameter {name!r} already belongs to another Gossip: use that one, or call "
                    "its detach() before you construct a new one."
                )


def check_stepped(modules: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse optimizers of other parameters than the modules'; warn of those never stepped."""
    stepped = {id(p): (p, o) for o in optimizers for p in parameters_of(o)}
    own = {id(p) for p in modules.parameters()}
    if any(own.isdisjoint(map(id, parameters_of(optimizer))) for optimizer in optimizers):
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


def _refuse_added(optimizer: torch.optim.Optimizer, known: frozenset[int]) -> None:
    added = [p for p in parameters_of(optimizer) if id(p) not in known]
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
