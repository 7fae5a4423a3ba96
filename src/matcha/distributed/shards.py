"""Shards: the part of a tensor that this process holds, where it is spread over several."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Replicate

__all__ = ["is_sharded", "like", "local", "share"]


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether other processes of the same worker may hold the rest of it."""
    return isinstance(tensor, DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part that this process holds; an ordinary tensor is its own.

    >>> part = torch.ones(3)
    >>> local(part) is part
    True
    """
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def like(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A part as a tensor that is spread over processes as another one is."""
    if not isinstance(tensor, DTensor):
        return part
    return DTensor.from_local(
        part.to(tensor.device),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def share(tensor: torch.Tensor, num_parts: int) -> float:
    """What one process's part counts for when all of a worker's processes add theirs up.

    Copies count once altogether: a part that k of the `num_parts` processes hold counts 1/k.

    >>> share(torch.ones(3), 4)
    0.25
    """
    distinct = 1
    if isinstance(tensor, DTensor):
        for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
            distinct *= 1 if isinstance(placement, Replicate) else size
    return distinct / num_parts
