"""Modulo messages: rotation, grid, wrapping and checks, for any number of blocks at once.

Every function takes blocks as the last axis (256 values, or 64 of a factor) and scales without it;
leading axes are free: a worker's blocks in the runtime, workers × blocks in the simulator. What
both ends must agree on before they meet is in numpy, so that the oracle in
tests/wires/definition.py reads it too. `encode` and `move` are what `kernels` and `gpu` do faster.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from matcha.wires.wire import Modulo

Array = npt.NDArray[Any]

FADE = 0.8
"""What a round leaves of a scale that nothing renews."""
FIRST = 1 / 64
"""The first scale as a share of a block's root mean square."""
LEAST = 1e-4
"""The first scale of a block of zeros."""
FINEST = 2.0**-20
"""The finest grid as a share of a block's root mean square: float32 has no more to say."""
ORDERS = 8
"""In how many orders a block's check may weigh its numbers."""
TURN = 0x5749
"""Seed of the fixed signs."""
_UPPER = -(1 << 13)  # the bits of a float32 that TF32 keeps


# -- rotation --------------------------------------------------------------------------------------


@cache
def hadamard(side: int) -> Array:
    """The Hadamard matrix of a power of two, scaled to be orthogonal.

    >>> (hadamard(2) * 2**0.5).round().tolist()
    [[1.0, 1.0], [1.0, -1.0]]
    """
    matrix = np.ones((1, 1))
    while len(matrix) < side:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]]) / math.sqrt(2)
    return matrix


@cache
def signs(block: int) -> Array:
    """The fixed random signs of a block, the same on every worker."""
    return np.random.default_rng(TURN).choice([-1.0, 1.0], size=block)


@cache
def _rotation(block: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    factor = torch.from_numpy(hadamard(math.isqrt(block))).to(device, dtype)
    return factor, torch.from_numpy(signs(block)).to(device, dtype)


@cache
def _whole_rotation(block: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    side = hadamard(math.isqrt(block))
    whole = signs(block)[:, None] * np.kron(side, side)
    return torch.from_numpy(whole).to(device, dtype)


def rotate(x: Tensor) -> Tensor:
    """Blocks turned so that no value stands out; lengths stay. `x` is left alone."""
    block = x.shape[-1]
    if x.is_cuda:
        return whole_product(x, _whole_rotation(block, x.dtype, x.device))
    factor, sign = _rotation(block, x.dtype, x.device)
    return _sides(x * sign, factor)


def unrotate(y: Tensor) -> Tensor:
    """The inverse of `rotate`; `y` is used up."""
    block = y.shape[-1]
    if y.is_cuda:
        return whole_product(y, _whole_rotation(block, y.dtype, y.device).T)
    factor, sign = _rotation(block, y.dtype, y.device)
    return _sides(y, factor).mul_(sign)


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


def _sides(x: Tensor, factor: Tensor) -> Tensor:
    """H X H for each block seen as a square X, in place; H is its own transpose."""
    side = factor.shape[0]
    once = torch.mm(x.view(-1, side), factor)
    squares = x.view(-1, side, side)
    torch.bmm(factor.expand_as(squares), once.view(-1, side, side), out=squares)
    return x


# -- checks ----------------------------------------------------------------------------------------


@cache
def check_weights(block: int) -> Array:
    """Weights of a block's numbers in its check: different odd numbers, in a few orders (rows).

    A plain sum misses two numbers that wrap in opposite directions, one order of different weights
    four whose weights cancel: a block in a thousand that wraps. What a check misses once it would
    miss at every scale, and two workers would never meet there again. (Seen in training, with
    either: disagreement in a few blocks that no rate lowered.) So the order changes from meeting
    to meeting, see `orders`.
    """
    random = np.random.default_rng(TURN)
    return np.stack([random.permutation(2.0 * np.arange(block) + 1) for _ in range(ORDERS)])


@cache
def weights(block: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`check_weights` as a tensor."""
    return torch.from_numpy(check_weights(block)).to(device, dtype)


def orders(common: Tensor) -> Tensor:
    """Which order of weights the blocks' checks have by their scales, which both ends know."""
    return common.to(torch.float32).view(torch.int32).bitwise_right_shift(16).remainder_(ORDERS)


def checks(k: Tensor, order: Tensor) -> Tensor:
    """The checks of blocks of whole numbers held as floats; exact below 2^24."""
    every = weights(k.shape[-1], k.dtype, k.device)
    if not k.is_cuda:
        return every.index_select(0, order.reshape(-1)).view(k.shape).mul_(k).sum(-1)
    # One pass over memory for all orders is less than several for the right one.
    with torch.autocast("cuda", enabled=False):
        found = k.reshape(-1, k.shape[-1]).mm(every.T).view(*k.shape[:-1], ORDERS)
    return found.gather(-1, order.to(torch.int64).unsqueeze(-1)).squeeze(-1)


# -- grid and scales -------------------------------------------------------------------------------


class Scales:
    """The scales of some blocks, one each, and what the round under way says of them."""

    def __init__(self, wire: Modulo, blocks: Tensor) -> None:
        self.wire, self.block = wire, blocks.shape[-1]
        self.scales = first_scales(blocks)
        self.sent, self.seen, self.finest = (torch.zeros_like(self.scales) for _ in range(3))
        """As they travel; the widest that meetings of this round saw; the least useful ones."""
        self.begin()

    def reset(self, blocks: Tensor) -> None:
        """Start again."""
        self.scales.copy_(first_scales(blocks))

    def begin(self) -> None:
        """A round begins; for all of it scales travel rounded to bfloat16."""
        self.sent.copy_(self.scales.to(torch.bfloat16))
        self.seen.zero_()
        self.finest.zero_()

    def end(self) -> None:
        """End a round in which the worker met another."""
        faded = torch.maximum(self.scales * FADE, self.seen)
        self.scales.copy_(torch.maximum(faded, self.finest))


def first_scales(blocks: Tensor) -> Tensor:
    """The scales before the first meeting, from what the blocks hold."""
    return blocks.square().mean(-1).sqrt_().mul_(FIRST).clamp_(min=LEAST)


def grid(common: Tensor, wire: Modulo) -> Tensor:
    """The common step δ of both ends, from the larger of their scales."""
    return common * (wire.clip_range / wire.half)


def levels(y: Tensor, step: Tensor, shift: Tensor | float = 0.0) -> Tensor:
    """Rotated blocks' nearest points of the grid, as whole numbers; `y` is used up.

    `shift` is `wire.shift` at the upper end of a link, 0 at the lower.
    """
    y.div_(step.unsqueeze(-1))
    if isinstance(shift, Tensor) or shift:
        y.sub_(shift)
    return y.round_()


def wrap(difference: Tensor, wire: Modulo) -> Tensor:
    """Differences of whole numbers as k in [−2^(b−1), 2^(b−1))."""
    return torch.remainder(difference + wire.half, 2 * wire.half).sub_(wire.half)


def trusted_share(wire: Modulo, block: int) -> float:
    """How wide differences are believed to be after a failed check, in steps per unit of the check.

    A check is as large as the root of its squared weights for differences of one step each.
    """
    return wire.failure_trust / float(np.sqrt((check_weights(block)[0] ** 2).sum()))


def seen_scales(
    lengths: Tensor, ok: Tensor, apart: Tensor, common: Tensor, wire: Modulo, block: int
) -> Tensor:
    """What a meeting says of a block's scale: the difference it saw, or wider after a failure.

    Two roundings add a sixth of a squared step to what is seen. After a failure `apart`, the upper
    end's check minus the lower's, a weighted sum of all differences whether they wrapped or not,
    tells how large they are, from a sample of one. Lengths are of the differences, in steps.
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
    """
    mean_square = lengths.square().div_(block)
    coarse = mean_square.mul(6.0).reciprocal_().neg_().add_(1.0).clamp_(min=0.0)
    if wire.shift:
        fine = mean_square.sub_(0.25).clamp_(min=0.0).sqrt_().mul_(2.5)
        return torch.minimum(coarse, fine).sqrt_()
    return torch.maximum(coarse, mean_square.mul_(math.pi / 2).clamp_(max=0.5)).sqrt_()


def finest_share(wire: Modulo, block: int) -> float:
    """The least useful scale per length of a block of values.

    A grid finer than the values' own last digits would count their rounding as difference.
    """
    return FINEST * wire.half / wire.clip_range / math.sqrt(block)


# -- one end's messages ----------------------------------------------------------------------------
# A number of b bits stands in the *upper* bits of its byte: the difference of two such bytes, as a
# signed one, is the difference of the numbers wrapped to [−2^(b−1), 2^(b−1)), in units of 2^(8−b).


class Coded(NamedTuple):
    """What `encode` writes of blocks: the message, and what its sender must know of it."""

    residues: Tensor
    """Whole numbers modulo 2^b, in the upper bits of a byte each; blocks are rows."""
    body: Tensor
    """The same, packed: what is sent."""
    checks: Tensor
    """Their weighted sums modulo 2^32."""
    finest: Tensor
    """The least useful scales, brought up to date."""


class Arrived(NamedTuple):
    """What `difference` reads: the partner's message, and one's own."""

    body: Tensor
    """The partner's packed residues."""
    residues: Tensor
    """One's own."""
    apart: Tensor
    """The upper end's checks minus the lower's."""
    common: Tensor
    """The link's scales."""
    seen: Tensor
    """The widest scales of the round so far, brought up to date."""


def encode(wire: Modulo, values: Tensor, common: Tensor, coded: Coded, *, lower: bool) -> None:
    """Write blocks' residues, their packed bytes and checks; note the least useful scales."""
    block = values.shape[-1]
    shift = 0.0 if lower else wire.shift
    y = levels(rotate(values), grid(common, wire), shift)
    n = y.to(torch.int32)
    table = weights(block, torch.int32, values.device)
    counts = table.index_select(0, orders(common)).mul_(n)
    torch.sum(counts, -1, dtype=torch.int32, out=coded.checks)
    # A check of what is no number must not hold.
    lost = (y.abs_().amax(-1) < 2.0**31).logical_not_()
    coded.checks.add_(lost, alpha=1 if lower else 2)
    coded.residues.copy_(n.bitwise_left_shift_(8 - wire.bits))
    pack(coded.residues.view(-1), wire.bits, coded.body)
    note_lengths(coded.finest, torch.linalg.vector_norm(values, dim=-1), wire, block)


def note_lengths(finest: Tensor, lengths: Tensor, wire: Modulo, block: int) -> None:
    """Note the least useful scales for blocks of these lengths."""
    torch.maximum(finest, lengths * finest_share(wire, block), out=finest)


def difference(wire: Modulo, arrived: Arrived, *, lower: bool) -> Tensor:
    """Upper minus lower end as two messages mean it; what it says of the scales is noted.

    Both ends work out the same numbers from the same bytes, whatever was sent.
    """
    body, residues, _, common, _ = arrived
    block, unit = residues.shape[-1], 2.0 ** (wire.bits - 8)
    theirs = unpack(body, wire.bits, torch.empty_like(residues).view(-1)).view_as(residues)
    raised = torch.sub(*((theirs, residues) if lower else (residues, theirs)), out=theirs)
    k = raised.view(torch.int8).to(common.dtype)
    sums = checks(k, orders(common)).mul_(unit)
    if wire.shift:
        k.add_(wire.shift / unit)
    lengths = torch.linalg.vector_norm(k, dim=-1).mul_(unit)
    step = learn(wire, sums, lengths, arrived, block)
    # Rotated before it is scaled: whole numbers this small add up exactly in any order.
    return unrotate(k).mul_(step.unsqueeze(-1))


def learn(wire: Modulo, sums: Tensor, lengths: Tensor, arrived: Arrived, block: int) -> Tensor:
    """Note what differences say of the scales; what each block's, as signed bytes, is to be times.

    `sums` are the differences' own checks: where they are not `apart`, something wrapped.
    """
    _, _, apart, common, seen = arrived
    ok = apart == sums.to(torch.int32)
    torch.maximum(seen, seen_scales(lengths, ok, apart, common, wire, block), out=seen)
    step = grid(common, wire).mul_(ok).mul_(2.0 ** (wire.bits - 8))
    return step.mul_(shrinkage(lengths, wire, block))


def move(wire: Modulo, values: Tensor, arrived: Arrived, *, lower: bool, weight: float) -> None:
    """Add the weight times the difference of two messages."""
    values.add_(difference(wire, arrived, lower=lower), alpha=weight)


# -- packing: small whole numbers side by side in bytes --------------------------------------------


def pack(raised: Tensor, bits: int, out: Tensor) -> None:
    """Lay numbers, a multiple of eight, side by side: bits/8 of a byte each.

    The vector is cut into parts that are laid over one another, so every operation runs over
    neighbouring bytes.

    >>> packed = torch.empty(2, dtype=torch.uint8)
    >>> pack(torch.tensor([1, 2, 3, 4], dtype=torch.uint8) << 4, 4, packed)
    >>> [hex(byte) for byte in packed]
    ['0x13', '0x24']
    """
    if bits == 8:
        out.copy_(raised)
    elif bits == 3:
        # Each of three bytes holds two numbers; the two bits left hold the upper bits of numbers 2
        # and 5 in the first two bytes, and in the third the lowest bits of both.
        r, out = raised.view(8, -1), out.view(3, -1)
        torch.bitwise_or(r[0::3], r[1::3] >> 3, out=out)
        out[:2].bitwise_or_(r[2::3] >> 6)
        out[2].bitwise_or_((r[2] & 0x20) >> 4).bitwise_or_((r[5] & 0x20) >> 5)
    else:
        first, *others = raised.view(8 // bits, -1)
        out.copy_(first)
        for number, other in enumerate(others, start=1):
            out.bitwise_or_(other >> (bits * number))


def unpack(packed: Tensor, bits: int, out: Tensor) -> Tensor:
    """The numbers that `pack` was given, in the upper bits of bytes.

    >>> numbers = torch.empty(4, dtype=torch.uint8)
    >>> (unpack(torch.tensor([0x13, 0x24], dtype=torch.uint8), 4, numbers) >> 4).tolist()
    [1, 2, 3, 4]
    """
    if bits == 8:
        return out.copy_(packed)
    if bits == 3:
        r, packed = out.view(8, -1), packed.view(3, -1)
        r[0::3].copy_(packed)
        r[1::3].copy_(packed << 3)
        r[2::3].copy_(packed[:2] << 6)
        r[2].bitwise_or_((packed[2] << 4).bitwise_and_(0x20))
        r[5].bitwise_or_((packed[2] << 5).bitwise_and_(0x20))
    else:
        for number, part in enumerate(out.view(8 // bits, -1)):
            torch.bitwise_left_shift(packed, bits * number, out=part)
    return out.bitwise_and_(0x100 - (1 << (8 - bits)))
