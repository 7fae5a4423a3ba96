"""Claims: which Gossip exchanges which parameters, so that misuse is noticed where it happens."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import ReferenceType, WeakSet, ref

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from matcha.errors import InputError

__all__ = ["Claim", "wrapped_by"]

_ATTRIBUTES = ("base_optimizer", "optimizer", "_optimizer")  # SAM's; Accelerate's; Lightning's


class Claim:
    """One Gossip's claim on the parameters it exchanges, and on the optimizers that step them.

    Args:
        parameters: by name; nobody else may hold them.
        optimizers: the only ones that may step them; with none, anything may change them.

    Attributes:
        stepping: whether one of the optimizers is in its step, in which it may call others.

    Raises:
        InputError: another Gossip holds a parameter.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        self.stepping = False
        self._parameters = list(parameters.values())
        self._optimizers = list(optimizers)
        for name, parameter in parameters.items():
            if _owner(parameter) is not None:
                gc.collect()  # one that nobody holds any more has no claim
            if _owner(parameter) is not None:
                raise InputError(
                    f"parameter {name!r} already belongs to another Gossip: use that one, or call "
                    "its detach() before you construct a new one."
                )

    def take(self) -> None:
        """From now on these are ours."""
        _watch_optimizers()
        _innocent.clear()
        for parameter in self._parameters:
            _owners[parameter] = ref(self)
        _ours.update(self._optimizers)

    @property
    def is_exclusive(self) -> bool:
        """Whether optimizers that were not named must leave the parameters alone."""
        return bool(self._optimizers)

    def release(self) -> None:
        """Give the parameters up."""
        for parameter in self._parameters:
            _owners.pop(parameter, None)
        for optimizer in self._optimizers:
            _ours.discard(optimizer)


_owners: Any = WeakTensorKeyDictionary()  # parameter -> reference to its Claim
_ours: WeakSet[torch.optim.Optimizer] = WeakSet()
_innocent: WeakSet[torch.optim.Optimizer] = WeakSet()  # looked through since the last claim
_watching = False


def wrapped_by(optimizer: Any) -> Any:
    """The optimizer that another one holds and hands steps on to; None where it holds none."""
    for name in _ATTRIBUTES:
        inside = getattr(optimizer, name, None)
        if inside is not None and hasattr(inside, "param_groups"):
            return inside
    return None


def _owner(parameter: torch.Tensor) -> Claim | None:
    found: ReferenceType[Claim] | None = _owners.get(parameter)
    return found() if found is not None else None


def _watch_optimizers() -> None:
    global _watching
    if not _watching:
        register_optimizer_step_pre_hook(_before_any_step)
        _watching = True


def _before_any_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _ours or optimizer in _innocent:
        return
    if wrapped_by(optimizer) in _ours:
        return
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    claims = [claim for claim in map(_owner, parameters) if claim is not None]
    if any(claim.is_exclusive and not claim.stepping for claim in claims):
        raise InputError(
            f"an optimizer that Gossip does not know ({type(optimizer).__name__}) steps the "
            "parameters that Gossip exchanges: construct Gossip after the optimizer, and give it "
            "all that step this model: Gossip(model, [first, second], plan)."
        )
    if not claims:
        _innocent.add(optimizer)
