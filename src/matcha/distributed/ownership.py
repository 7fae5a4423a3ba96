"""Ownership: what belongs to a Gossip, and what others must not do to it."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import ReferenceType, WeakSet, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from matcha.distributed.exchange.buckets import Bucket
from matcha.errors import InputError, ModelError

__all__ = [
    "Optimizers",
    "ParameterOwnership",
    "as_list",
    "check_in_place",
    "check_parallel",
    "check_stepped",
    "combine",
    "computes_several_gradients",
    "hookable",
    "unwrap",
    "wrapped_by",
]

_ATTRIBUTES = ("base_optimizer", "optimizer", "_optimizer")  # SAM's; Accelerate's; Lightning's


class ParameterOwnership:
    """One Gossip's ownership of the parameters it exchanges, and of the optimizers that step them.

    An optimizer constructed after Gossip is an object that Gossip has never seen, and would train
    without a single exchange. PyTorch offers one place to notice it, a hook on the steps of all
    optimizers; it stands only while a Gossip with optimizers does, and changes nothing.

    Args:
        parameters: by name; no other Gossip may own them.
        optimizers: the only ones that may step them; with none, anything may change them.

    Attributes:
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
        self._optimizers = list(optimizers)
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
        _known.update(self._optimizers)
        _harmless.clear()
        _watch_optimizers()

    @property
    def is_exclusive(self) -> bool:
        """Whether optimizers that were not named must leave the parameters alone."""
        return bool(self._optimizers)

    def release(self) -> None:
        """Give the parameters up."""
        for parameter in self._parameters:
            _owners.pop(parameter, None)
        for optimizer in self._optimizers:
            _known.discard(optimizer)
        _watch_optimizers()


_owners: Any = WeakTensorKeyDictionary()  # parameter -> reference to its ParameterOwnership
_known: WeakSet[torch.optim.Optimizer] = WeakSet()
_harmless: WeakSet[torch.optim.Optimizer] = WeakSet()  # checked since parameters were last taken
_watching: list[Any] = []  # the hook's handle, while it stands


def wrapped_by(optimizer: Any) -> Any:
    """The optimizer that another one holds and hands steps on to; None where it holds none."""
    for name in _ATTRIBUTES:
        inside = getattr(optimizer, name, None)
        if inside is not None and hasattr(inside, "param_groups"):
            return inside
    return None


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
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    owners = [owner for owner in map(_owner, parameters) if owner is not None]
    if any(owner.is_exclusive and not owner.is_stepping for owner in owners):
        raise InputError(
            f"an optimizer that Gossip does not know ({type(optimizer).__name__}) steps the "
            "parameters that Gossip exchanges: construct Gossip after the optimizer, and give it "
            "all that step this model: Gossip(model, [first, second], plan)."
        )
    if not owners:
        _harmless.add(optimizer)


# -- optimizers, and what they step ----------------------------------------------------------------

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None


def as_list(given: Optimizers) -> list[Any]:
    """Return the optimizers that a script gave: none, one or several."""
    if given is None:
        return []
    return list(given) if isinstance(given, Iterable) else [given]


def hookable(given: Iterable[Any]) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers whose `step()` changes parameters, taken out of their wrappers.

    Raises:
        InputError: the steps of one cannot be followed.
    """
    return tuple(_unwrapped(optimizer) for optimizer in given)


def computes_several_gradients(optimizer: object) -> bool:
    """Whether it computes gradients at several points per step, as LBFGS and SAM do."""
    return isinstance(optimizer, torch.optim.LBFGS) or _perturbs(optimizer)


def _perturbs(optimizer: object) -> bool:
    """Whether it is like SAM: a first step away, a second back and on by an optimizer inside."""
    return hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step")


def _unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    hooked = hasattr(optimizer, "_optimizer_step_pre_hooks") and not _perturbs(optimizer)
    if hooked:
        return optimizer
    inside = wrapped_by(optimizer)
    if inside is not None:
        return _unwrapped(inside)
    raise InputError(
        f"the steps of {type(optimizer).__name__} cannot be followed: give Gossip the "
        "torch.optim.Optimizer inside it, or None and call gossip.step() after each update."
    )


def combine(model: nn.Module, also: Sequence[nn.Module]) -> nn.Module:
    """Return the model and further modules as one module, or the model itself if it is alone."""
    for module in also:
        if not isinstance(module, nn.Module):
            raise InputError(
                f"also= holds a {type(module).__name__}, but it takes modules: for a parameter "
                "alone, nn.ParameterList([parameter])."
            )
    if not also:
        return model
    first, *others = (getattr(module, "_orig_mod", module) for module in (model, *also))
    return nn.ModuleDict({"model": first, "also": nn.ModuleList(others)})


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside `torch.compile` and DistributedDataParallel."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inside := getattr(model, "_orig_mod", None), nn.Module):
            model = inside
        else:
            return model


def check_stepped(modules: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse optimizers of other parameters than the modules'; warn of those never stepped."""
    stepped = {
        id(p): (p, o) for o in optimizers for group in o.param_groups for p in group["params"]
    }
    own = {id(p) for p in modules.parameters()}
    for optimizer in optimizers:
        if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            raise InputError(
                "the optimizer steps none of the model's parameters: give it this model's."
            )
    others = [(p, o) for key, (p, o) in stepped.items() if key not in own]
    if others:
        parameter, optimizer = others[0]
        raise InputError(
            f"{type(optimizer).__name__} steps {_count(others, 'parameter')} that the model does "
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
            stacklevel=4,
        )


def _count(found: Sequence[Any], noun: str) -> str:
    return f"{len(found)} {noun}s" if len(found) > 1 else f"a {noun}"


def check_parallel(model: nn.Module, group_size: int) -> None:
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


def check_in_place(buckets: Iterable[Bucket], frozen: Iterable[nn.Parameter]) -> None:
    """Take back parameters that were given other values; refuse those that became others.

    Raises:
        ModelError: a parameter changed its kind, or began to train.
    """
    for bucket in buckets:
        name = bucket.take_back()
        if name is not None:
            raise ModelError(
                f"parameter {name!r} has another device, dtype or shape than when Gossip took "
                "it in (model.to(...)): change the model first, then construct Gossip."
            )
    for parameter in frozen:
        if parameter.requires_grad:
            raise ModelError(
                "a parameter that was frozen when Gossip was constructed now trains, but is "
                "not exchanged: call detach() and construct Gossip again."
            )
