"""Modulo messages: rotation, grid, wrapping and checks, for any number of blocks at once.

Every function takes blocks as the last axis (256 values, or 64 of a factor) and scales without it;
leading axes are free: a worker's blocks in the runtime, workers × blocks in the simulator.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from torch import Tensor

from matcha.wires.definition import (
    FADE,
    FINEST,
    FIRST,
    LEAST,
    check_weights,
    hadamard,
    signs,
)
from matcha.wires.wire import Modulo


@cache
def _rotation(block: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    side = math.isqrt(block)
    factor = torch.from_numpy(hadamard(side)).to(device, dtype)
    return factor, torch.from_numpy(signs(block)).to(device, dtype)


@cache
def _whole_rotation(block: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    side = hadamard(math.isqrt(block))
    whole = signs(block)[:, None] * np.kron(side, side)
    return torch.from_numpy(whole).to(device, dtype)


def rotate(x: Tensor) -> Tensor:
    """Blocks turned so that no value stands out; lengths stay. The result is new memory."""
    block = x.shape[-1]
    if x.is_cuda:  # one product with 256 × 256 is one pass over memory there
        return x.reshape(-1, block).matmul(_whole_rotation(block, x.dtype, x.device)).view(x.shape)
    factor, sign = _rotation(block, x.dtype, x.device)
    return _sides(x * sign, factor)


def unrotate(y: Tensor) -> Tensor:
    """The inverse of `rotate`; `y` may be used up."""
    block = y.shape[-1]
    if y.is_cuda:
        whole = _whole_rotation(block, y.dtype, y.device)
        return y.reshape(-1, block).matmul(whole.T).view(y.shape)
    factor, sign = _rotation(block, y.dtype, y.device)
    return _sides(y, factor).mul_(sign)


def _sides(x: Tensor, factor: Tensor) -> Tensor:
    """H X H for each block seen as a square X; the Hadamard matrix is its own transpose."""
    side = factor.shape[0]
    once = torch.mm(x.reshape(-1, side), factor)
    squares = once.view(-1, side, side)
    return torch.matmul(factor, squares).view(x.shape)


@cache
def weights(block: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What each number of a block counts in its check."""
    return torch.from_numpy(check_weights(block)).to(device, dtype)


@cache
def _check_length(block: int) -> float:
    """How large a check is for differences of one step each and signs of their own."""
    return float(np.sqrt((check_weights(block) ** 2).sum()))


def first_scales(blocks: Tensor) -> Tensor:
    """The scales before the first meeting, from what the blocks hold."""
    return blocks.square().mean(-1).sqrt_().mul_(FIRST).clamp_(min=LEAST)


def sent_scales(scales: Tensor) -> Tensor:
    """Scales as they travel: rounded to bfloat16."""
    return scales.to(torch.bfloat16).to(scales.dtype)


def grid(common: Tensor, wire: Modulo) -> Tensor:
    """The common step δ of both ends, from the larger of their scales."""
    return common * (wire.reach / wire.half)


def levels(y: Tensor, step: Tensor, shift: Tensor | float = 0.0) -> Tensor:
    """Each value's nearest point of the grid, as whole numbers; `y` is used up.

    Args:
        y: rotated blocks.
        step: the grid's, one a block.
        shift: `wire.shift` at the upper end of a link, 0 at the lower.
    """
    y.div_(step.unsqueeze(-1))
    if isinstance(shift, Tensor) or shift:
        y.sub_(shift)
    return y.round_()


def wrap(difference: Tensor, wire: Modulo) -> Tensor:
    """Differences of whole numbers as k in [−2^(b−1), 2^(b−1))."""
    return torch.remainder(difference + wire.half, 2 * wire.half).sub_(wire.half)


def seen_scales(k: Tensor, ok: Tensor, apart: Tensor, common: Tensor, wire: Modulo) -> Tensor:
    """What a meeting says of a block's scale: the difference it saw, or wider after a failure.

    Two roundings add a sixth of a squared step to what is seen. After a failure the difference of
    the two checks, a weighted sum of all differences whether they wrapped or not, tells how large
    they are, from a sample of one.

    Args:
        k: the differences in steps; blocks are the last axis.
        ok: which blocks hold.
        apart: the upper end's check minus the lower's.
        common: the link's scales.
        wire: how many bits.
    """
    step, block = grid(common, wire), k.shape[-1]
    squares = torch.linalg.vector_norm(k, dim=-1).square_().div_(block)
    seen = squares.sub_(1 / 6).clamp_(min=0.0).sqrt_().mul_(step)
    share = wire.trust / _check_length(block)
    guessed = apart.to(k.dtype).abs_().nan_to_num_(0.0, 0.0).mul_(step * share)
    return torch.where(ok, seen, torch.maximum(common * wire.widening, guessed))


def finest_scales(blocks: Tensor, wire: Modulo) -> Tensor:
    """The least useful scale for blocks of values, as they are or rotated.

    A grid finer than the values' own last digits would count their rounding as difference.
    """
    share = FINEST * wire.half / wire.reach / math.sqrt(blocks.shape[-1])
    lengths: Tensor = torch.linalg.vector_norm(blocks, dim=-1)
    return lengths.mul_(share)


def next_scales(scales: Tensor, seen: Tensor, finest: Tensor) -> Tensor:
    """The scales after a round in which the worker met somebody."""
    return torch.maximum(torch.maximum(scales * FADE, seen), finest)
