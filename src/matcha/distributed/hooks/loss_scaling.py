"""Loss scaling: with `torch.amp.GradScaler`, a skipped step must still take part in its round.

A scaler leaves out `optimizer.step()` when a gradient overflowed. Overflow is one worker's private
matter, but the round is not: its partner waits. The scaler has no hook to tell, so its `step` is
wrapped once, for all: where the optimizer of a Gossip was not stepped, Gossip hears of it. Nothing
about the scaler, the gradients or the optimizer changes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakValueDictionary

import torch

__all__ = ["LossScaling"]


class LossScaling:
    """Notices that a scaler has left out a step of one optimizer; idle when no scaler is used.

    Args:
        optimizer: whose steps may be left out.
        skipped: called when one was.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, skipped: Callable[[], None]) -> None:
        self.stepped = False
        self.skipped = skipped
        self._key = id(optimizer)
        _watched[self._key] = self
        _watch_scalers()

    def detach(self) -> None:
        """Hear no more."""
        _watched.pop(self._key, None)


# By identity and weakly: whoever drops the optimizer drops its hooks, and those own the value.
_watched: WeakValueDictionary[int, LossScaling] = WeakValueDictionary()


def _watch_scalers() -> None:
    original = torch.amp.GradScaler.step
    if hasattr(original, "_matcha"):
        return

    @wraps(original)
    def step(scaler: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        scaling = _watched.get(id(optimizer))
        if scaling is None:
            return original(scaler, optimizer, *args, **kwargs)
        scaling.stepped = False
        result = original(scaler, optimizer, *args, **kwargs)
        if not scaling.stepped:
            scaling.skipped()
        return result

    step._matcha = True  # type: ignore[attr-defined]
    torch.amp.GradScaler.step = step  # type: ignore[method-assign, assignment]
