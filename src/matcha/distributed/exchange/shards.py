"""Shards: the part of a tensor that this process holds, where it is spread over several."""

from __future__ import annotations

import sys
from typing import Any

import torch

__all__ = ["gathered", "is_sharded", "like", "local", "share"]


def _spread(tensor: torch.Tensor) -> Any:
    """The tensor, where it is a DTensor; else None.

    Checked via sys.modules: importing them takes as long as half of torch.
    """
    for home in ("torch.distributed.tensor", "torch.distributed._tensor"):  # the latter in 2.4
        kind = getattr(sys.modules.get(home), "DTensor", None)
        if kind is not None:
            return tensor if isinstance(tensor, kind) else None
    return None


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether other processes of the same worker may hold the rest of it."""
    return _spread(tensor) is not None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part that this process holds; an ordinary tensor is its own.

    >>> part = torch.ones(3)
    >>> local(part) is part
    True
    """
    spread = _spread(tensor)
    if spread is None:
        return tensor
    with torch.no_grad():
        part: torch.Tensor = spread.to_local()
    return part


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a sharded tensor, copied to the CPU. A collective call."""
    spread = _spread(tensor)
    if spread is None:
        return tensor
    whole: torch.Tensor = spread.full_tensor().detach().to("cpu", copy=True)
    return whole


def like(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A part as a tensor that is spread over processes as another one is."""
    spread = _spread(tensor)
    if spread is None:
        return part
    whole: torch.Tensor = spread.from_local(
        part.to(tensor.device),
        spread.device_mesh,
        spread.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    return whole


def share(tensor: torch.Tensor, num_parts: int) -> float:
    """What one process's part counts for when all of a worker's processes add theirs up.

    Copies count once altogether: a part that k of the `num_parts` processes hold counts 1/k.

    >>> share(torch.ones(3), 4)
    0.25
    """
    distinct = 1
    spread = _spread(tensor)
    if spread is not None:
        for size, placement in zip(spread.device_mesh.shape, spread.placements, strict=True):
            distinct *= 1 if placement.is_replicate() else size
    return distinct / num_parts
