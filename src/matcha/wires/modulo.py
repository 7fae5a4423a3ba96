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

from matcha.wires.shared import (
    FADE,
    FINEST,
    FIRST,
    LEAST,
    ORDERS,
    check_weights,
    hadamard,
    signs,
)
from matcha.wires.wire import Modulo

_UPPER = -(1 << 13)  # the bits of a float32 that TF32 keeps
_ROUNDING = 3.0 * 2**22  # float32 around it are whole numbers


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


def rotate(x: Tensor, out: Tensor | None = None, spare: Tensor | None = None) -> Tensor:
    """Blocks turned so that no value stands out; lengths stay. `x` is left alone."""
    block = x.shape[-1]
    if x.is_cuda:
        return whole_product(x, _whole_rotation(block, x.dtype, x.device))
    factor, sign = _rotation(block, x.dtype, x.device)
    return _sides(torch.mul(x, sign, out=out), factor, spare)


def unrotate(y: Tensor, spare: Tensor | None = None) -> Tensor:
    """The inverse of `rotate`; `y` is used up."""
    block = y.shape[-1]
    if y.is_cuda:
        return whole_product(y, _whole_rotation(block, y.dtype, y.device).T)
    factor, sign = _rotation(block, y.dtype, y.device)
    return _sides(y, factor, spare).mul_(sign)


def whole_product(x: Tensor, rotation: Tensor) -> Tensor:
    """Blocks times a matrix: on a GPU a product with 256 × 256 is one pass over memory.

    Exact to float32 whatever precision the user chose for matrix products elsewhere, autocast and
    TF32: workers that differ by less than a product's error would count the error as difference.
    TF32 keeps 10 bits of a mantissa, so values go through it in two parts.
    """
    flat = x.reshape(-1, x.shape[-1])
    with torch.autocast(x.device.type, enabled=False):
        if x.dtype != torch.float32:
            return flat.matmul(rotation).view(x.shape)
        upper = flat.view(torch.int32).bitwise_and(_UPPER).view(torch.float32)
        return upper.matmul(rotation).add_((flat - upper).matmul(rotation)).view(x.shape)


def _sides(x: Tensor, factor: Tensor, spare: Tensor | None) -> Tensor:
    """H X H for each block seen as a square X, in place; H is its own transpose."""
    side = factor.shape[0]
    once = torch.empty_like(x) if spare is None else spare
    torch.mm(x.view(-1, side), factor, out=once.view(-1, side))
    squares = x.view(-1, side, side)
    torch.bmm(factor.expand_as(squares), once.view(-1, side, side), out=squares)
    return x


@cache
def weights(block: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What each number of a block counts in its check, in each of the orders (rows)."""
    return torch.from_numpy(check_weights(block)).to(device, dtype)


def orders(common: Tensor) -> Tensor:
    """Which order of weights the blocks' checks have by their scales, which both ends know."""
    return common.to(torch.float32).view(torch.int32).bitwise_right_shift(16).remainder_(ORDERS)


def checks(k: Tensor, order: Tensor, spare: Tensor | None = None) -> Tensor:
    """The checks of blocks of whole numbers held as floats; exact below 2^24."""
    every = weights(k.shape[-1], k.dtype, k.device)
    if not k.is_cuda:
        chosen = torch.index_select(every, 0, order.reshape(-1), out=_flat(spare)).view(k.shape)
        return chosen.mul_(k).sum(-1)
    # One pass over memory for all orders is less than several for the right one.
    with torch.autocast("cuda", enabled=False):
        found = k.reshape(-1, k.shape[-1]).mm(every.T).view(*k.shape[:-1], ORDERS)
    return found.gather(-1, order.to(torch.int64).unsqueeze(-1)).squeeze(-1)


def _flat(blocks: Tensor | None) -> Tensor | None:
    return None if blocks is None else blocks.view(-1, blocks.shape[-1])


def trusted_share(wire: Modulo, block: int) -> float:
    """How wide differences are believed to be after a failed check, in steps per unit of the check.

    A check is as large as the root of its squared weights for differences of one step each.
    """
    return wire.failure_trust / float(np.sqrt((check_weights(block)[0] ** 2).sum()))


def first_scales(blocks: Tensor) -> Tensor:
    """The scales before the first meeting, from what the blocks hold."""
    return blocks.square().mean(-1).sqrt_().mul_(FIRST).clamp_(min=LEAST)


def sent_scales(scales: Tensor) -> Tensor:
    """Scales as they travel: rounded to bfloat16."""
    return scales.to(torch.bfloat16).to(scales.dtype)


def grid(common: Tensor, wire: Modulo) -> Tensor:
    """The common step δ of both ends, from the larger of their scales."""
    return common * (wire.clip_range / wire.half)


def levels(y: Tensor, step: Tensor, shift: Tensor | float = 0.0) -> Tensor:
    """Each value's nearest point of the grid, as whole numbers; `y` is used up.

    Args:
        y: rotated blocks.
        step: the grid's, one per block.
        shift: `wire.shift` at the upper end of a link, 0 at the lower.
    """
    return _in_steps(y, step, shift).round_()


def _in_steps(y: Tensor, step: Tensor, shift: Tensor | float) -> Tensor:
    y.div_(step.unsqueeze(-1))
    if isinstance(shift, Tensor) or shift:
        y.sub_(shift)
    return y


def whole_numbers(y: Tensor, step: Tensor, shift: float, *, small: bool) -> Tensor:
    """`levels` as integers whose lower bits, and whose check, are theirs; `y` is used up.

    Args:
        y: rotated blocks.
        step: the grid's, one per block.
        shift: as for `levels`.
        small: whether all are float32 and below 2^22, see `are_small`. Adding 3·2^22 then rounds,
            and leaves the number in the lower bits of a float. What stands above it does not count:
            it is a multiple of 2^20, and so are the sums of weights a multiple of 2^12.
    """
    if not small:
        return levels(y, step, shift).to(torch.int32)
    return _in_steps(y, step, shift).add_(_ROUNDING).view(torch.int32)


def are_small(lengths: Tensor, step: Tensor) -> bool:
    """Whether `whole_numbers` may take its short way, by the blocks' lengths; never on a GPU."""
    if lengths.is_cuda or lengths.dtype != torch.float32:
        return False
    return bool((lengths < step * (_ROUNDING / 4)).all())


def wrap(difference: Tensor, wire: Modulo) -> Tensor:
    """Differences of whole numbers as k in [−2^(b−1), 2^(b−1))."""
    return torch.remainder(difference + wire.half, 2 * wire.half).sub_(wire.half)


def seen_scales(
    lengths: Tensor, ok: Tensor, apart: Tensor, common: Tensor, wire: Modulo, block: int
) -> Tensor:
    """What a meeting says of a block's scale: the difference it saw, or wider after a failure.

    Two roundings add a sixth of a squared step to what is seen. After a failure the difference of
    the two checks, a weighted sum of all differences whether they wrapped or not, tells how large
    they are, from a sample of one.

    Args:
        lengths: of the blocks' differences, in steps.
        ok: which blocks hold.
        apart: the upper end's check minus the lower's.
        common: the link's scales.
        wire: how many bits.
        block: how many values a block has.
    """
    step = grid(common, wire)
    seen = lengths.square().div_(block).sub_(1 / 6).clamp_(min=0.0).sqrt_().mul_(step)
    guessed = apart.to(step.dtype).abs().nan_to_num_(0.0, 0.0)
    guessed.mul_(step * trusted_share(wire, block))
    return torch.where(ok, seen, torch.maximum(common * wire.widening, guessed))


def shrinkage(lengths: Tensor, wire: Modulo, block: int) -> Tensor:
    """The share of a block's seen difference to move by: rounding adds to it what is not there.

    Two roundings add a sixth of a squared step to the k that are seen, and nothing tells which part
    of a k is theirs. Of a difference that is new at each meeting, moving by the share
    c = 1 − 1/(6 k²) leaves least (James and Stein); one that comes back the same way, as
    heterogeneous data make it, wants to be moved whole. The root of c costs either little. Of a
    difference much finer than a step, E k² is E|D| and c is π/2 k²; with two bits, whose k is ±½ at
    least, 2.5 √(k² − ¼). Both ends know the same k, so they still move by opposite amounts.

    Args:
        lengths: of the blocks' differences, in steps.
        wire: how many bits.
        block: how many values a block has.
    """
    mean_square = lengths.square().div_(block)
    coarse = mean_square.mul(6.0).reciprocal_().neg_().add_(1.0).clamp_(min=0.0)
    if wire.shift:
        fine = mean_square.sub_(0.25).clamp_(min=0.0).sqrt_().mul_(2.5)
        return torch.minimum(coarse, fine).sqrt_()
    return torch.maximum(coarse, mean_square.mul_(math.pi / 2).clamp_(max=0.5)).sqrt_()


def finest_scales(lengths: Tensor, wire: Modulo, block: int) -> Tensor:
    """The least useful scale for blocks of values, by their lengths.

    A grid finer than the values' own last digits would count their rounding as difference.
    """
    return lengths * finest_share(wire, block)


def finest_share(wire: Modulo, block: int) -> float:
    """The least useful scale per length of a block of values."""
    return FINEST * wire.half / wire.clip_range / math.sqrt(block)


def next_scales(scales: Tensor, seen: Tensor, finest: Tensor) -> Tensor:
    """The scales after a round in which the worker met another."""
    return torch.maximum(torch.maximum(scales * FADE, seen), finest)
