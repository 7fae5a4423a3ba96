"""Quasi-global momentum's last step on a GPU, in Triton: one pass where torch makes a dozen."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from matcha.wires.wire import BLOCK

_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def _fold(
    first,
    second,
    x,
    hat,
    momentum,
    limits,
    numbers,
    SWING: tl.constexpr,
    STEPS_FIRST: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    places = block * _BLOCK + tl.arange(0, _BLOCK)
    between, after = tl.load(second + places), tl.load(x + places)
    local, mixing = tl.load(first + places) - between, between - after
    if not STEPS_FIRST:
        local, mixing = mixing, local
    followed = mixing * tl.load(numbers)
    limit = tl.load(limits + block) + tl.sqrt(tl.sum(after * after, 0)) * SWING
    length = tl.sqrt(tl.sum(followed * followed, 0))
    share = tl.minimum(limit / tl.maximum(length, 1e-37), 1.0)
    followed = tl.where(length < float("inf"), followed * share, 0.0)
    kept = tl.load(hat + places) * tl.load(numbers + 1)
    tl.store(momentum + places, kept + (followed + local) * tl.load(numbers + 2))


def fold(
    first: Tensor,
    second: Tensor,
    x: Tensor,
    hat: Tensor,
    momentum: Tensor,
    limits: Tensor,
    numbers: Tensor,
    swing: float,
    *,
    steps_first: bool,
) -> None:
    """Write the memory that follows a step and a round, as `QuasiGlobal.after_round` says.

    `limits` is how far a round may move each block and be followed whole, by its gradient; `swing`
    per length of the values is added. `numbers` are the share of a round that is followed, what the
    memory keeps of itself, and what displacements count in it.
    """
    places = first, second, x, hat, momentum, limits, numbers
    with torch.cuda.device_of(x):
        _fold[(x.numel() // BLOCK,)](*places, SWING=swing, STEPS_FIRST=steps_first, num_warps=1)
