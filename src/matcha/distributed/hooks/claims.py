"""Ownership: which Gossip exchanges which parameters, so that misuse is noticed at once."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import ReferenceType, WeakSet, ref

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from matcha.errors import InputError

__all__ = ["ParameterOwnership", "wrapped_by"]

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
