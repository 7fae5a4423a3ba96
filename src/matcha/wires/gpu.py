"""Fused kernels of modulo wires on a GPU, in Triton: one pass over a block of 256 values.

What `modulo` and `batched` do with torch, at the speed of the GPU's memory. The rotation adds in
the order of kernels.c, so that a GPU and a CPU with compiled kernels send the same whole numbers.
Triton comes with torch where torch knows GPUs; where it is missing, torch does it all.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from matcha.wires import modulo
from matcha.wires.wire import BLOCK, Modulo

_BLOCK = tl.constexpr(BLOCK)
_ORDERS = tl.constexpr(modulo.ORDERS)
_HALF_PI = tl.constexpr(1.5707963267948966)


@triton.jit
def _divided(a, b):
    """IEEE division: the quotient that other processors find."""
    if a.dtype == tl.float64:
        return a / b
    else:
        return tl.div_rn(a, b)


@triton.jit
def _root(a):
    if a.dtype == tl.float64:
        return tl.sqrt(a)
    else:
        return tl.sqrt_rn(a)


@triton.jit
def _rounded(a):
    """The nearest whole number, halves to even ones; beyond 2^23 (2^52) all numbers are whole."""
    if a.dtype == tl.float64:
        whole = (tl.abs(a) + 4503599627370496.0) - 4503599627370496.0
        large = 4503599627370496.0
    else:
        whole = (tl.abs(a) + 8388608.0) - 8388608.0
        large = 8388608.0
    return tl.where(tl.abs(a) < large, tl.where(a < 0, -whole, whole), a)


@triton.jit
def _turned(x):
    """The Hadamard transform of 256 numbers, not scaled: H X H for a block seen as a square X."""
    x = tl.reshape(x, [2, 2, 2, 2, 2, 2, 2, 2])
    for _ in tl.static_range(8):
        a, b = tl.split(x)
        x = tl.permute(tl.join(a + b, a - b), (7, 0, 1, 2, 3, 4, 5, 6))
    return tl.reshape(x, [_BLOCK])


@triton.jit
def _whole_numbers(y, step, shift):
    """Points of the grid, and whether all are numbers below 2^31."""
    n = _rounded(_divided(y, step) - shift)
    fits = tl.abs(n) < 2147483648.0
    return tl.where(fits, n, 0.0).to(tl.int32), tl.min(fits.to(tl.int32), 0) != 0


@triton.jit
def _check(n, counts):
    """The weighted sum of whole numbers modulo 2^32."""
    return tl.sum((n * counts).to(tl.int64), 0).to(tl.int32)


@triton.jit
def _weights(table, common, lanes):
    """What each number of a block counts in its check, by the link's scale."""
    order = (common.to(tl.float32).to(tl.uint32, bitcast=True) >> 16) % _ORDERS
    return tl.load(table + order.to(tl.int32) * _BLOCK + lanes)


@triton.jit
def _note_length(place, y, FINEST: constexpr):
    """Note a block's least useful scale, see `modulo.finest_share`; none if its length is none."""
    length = _root(tl.sum(y * y, 0))
    finest = tl.where(length < float("inf"), length * FINEST, 0.0)
    tl.store(place, tl.maximum(tl.load(place), finest))


@triton.jit
def _learn(
    k, holds, known, apart, common, step, BITS: constexpr, WIDENING: constexpr, TRUST: constexpr
):
    """From differences k: what the meeting says of the scale, and the step to move by.

    `modulo.seen_scales` and `modulo.shrinkage` say why; the operations are theirs, one by one.
    """
    length = _root(tl.sum(k * k, 0))
    square = length * length / _BLOCK
    inner = _root(tl.maximum(square - 1 / 6, 0.0))
    guessed = tl.abs(apart.to(k.dtype)) * (step * TRUST)
    wider = tl.maximum(common * WIDENING, tl.where(known, guessed, 0.0))
    coarse = tl.maximum(1.0 - _divided(step * 0.0 + 1.0, square * 6.0), 0.0)
    if BITS == 2:
        share = tl.minimum(coarse, _root(tl.maximum(square - 0.25, 0.0)) * 2.5)
    else:
        share = tl.maximum(coarse, tl.minimum(square * _HALF_PI, 0.5))
    return tl.where(holds, inner * step, wider), tl.where(holds, step * _root(share), 0.0)


@triton.jit
def _meet(
    base,
    out,
    partner,
    move,
    sent,
    seen,
    finest,
    met,
    filled,
    signs,
    weights,
    number,
    BITS: constexpr,
    CLIP: constexpr,
    SHIFT: constexpr,
    FINEST: constexpr,
    WIDENING: constexpr,
    TRUST: constexpr,
):
    """Both ends of a link meet in one of its blocks; programs of upper ends have nothing to do."""
    lower = tl.program_id(1).to(tl.int64)
    weight = tl.load(move + lower)
    if weight > 0:
        upper = tl.load(partner + lower)
        block = tl.program_id(0)
        mine, theirs = lower * number + block, upper * number + block
        lanes = tl.arange(0, _BLOCK)
        first, second = mine * _BLOCK + lanes, theirs * _BLOCK + lanes
        common = tl.maximum(tl.load(sent + mine), tl.load(sent + theirs))
        step = common * CLIP
        sign = tl.load(signs + lanes)
        y = _turned(tl.load(base + first) * sign)
        _note_length(finest + mine, y, FINEST)
        low, low_fits = _whole_numbers(y, step, 0.0)
        y = _turned(tl.load(base + second) * sign)
        _note_length(finest + theirs, y, FINEST)
        up, up_fits = _whole_numbers(y, step, SHIFT)
        apart, known = up - low, low_fits & up_fits
        k = (apart << (32 - BITS)) >> (32 - BITS)
        counts = _weights(weights, common, lanes)
        holds = known & (_check(apart - k, counts) == 0)
        real = k.to(y.dtype) + SHIFT
        check = _check(apart, counts)
        learnt, size = _learn(real, holds, known, check, common, step, BITS, WIDENING, TRUST)
        tl.store(seen + mine, tl.maximum(tl.load(seen + mine), learnt))
        tl.store(seen + theirs, tl.maximum(tl.load(seen + theirs), learnt))
        tl.store(met + lower, 1)
        tl.store(met + upper, 1)
        # Padding is zero and stays zero, though a rotated message moves it too.
        values = lanes < tl.load(filled + block)
        difference = _turned(real) * sign * size
        tl.store(out + first, tl.load(out + first, values) + difference * weight, values)
        weight = tl.load(move + upper)
        tl.store(out + second, tl.load(out + second, values) + difference * weight, values)


@triton.jit
def _encode(
    values,
    common,
    residues,
    checks,
    finest,
    signs,
    weights,
    BITS: constexpr,
    CLIP: constexpr,
    SHIFT: constexpr,
    FINEST: constexpr,
    UPPER: constexpr,
):
    """A block's residues in the upper bits of bytes, and its check."""
    block = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, _BLOCK)
    places = block * _BLOCK + lanes
    scale = tl.load(common + block)
    y = _turned(tl.load(values + places) * tl.load(signs + lanes))
    _note_length(finest + block, y, FINEST)
    n, fits = _whole_numbers(y, scale * CLIP, SHIFT if UPPER else 0.0)
    tl.store(residues + places, (n << (8 - BITS)).to(tl.uint8))
    # What is no number must not hold, as kernels.c explains.
    check = _check(n, _weights(weights, scale, lanes))
    tl.store(checks + block, tl.where(fits, check, check + (2 if UPPER else 1)))


@triton.jit
def _pack(raised, packed, part, BITS: constexpr, SIZE: constexpr):
    """Lay parts of a vector over one another, as `modulo.pack` does."""
    k = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    there = k < part
    if BITS == 3:
        last = tl.load(raised + 6 * part + k, there) | tl.load(raised + 7 * part + k, there) >> 3
        for row in tl.static_range(2):
            r = raised + 3 * row * part + k
            third = tl.load(r + 2 * part, there)
            two = tl.load(r, there) | tl.load(r + part, there) >> 3
            tl.store(packed + row * part + k, two | third >> 6, there)
            last |= (third & 0x20) >> (4 + row)
        tl.store(packed + 2 * part + k, last, there)
    else:
        byte = tl.load(raised + k, there)
        for other in tl.static_range(1, 8 // BITS):
            byte |= tl.load(raised + other * part + k, there) >> (other * BITS)
        tl.store(packed + k, byte, there)


@triton.jit
def _unpacked(packed, place, part, BITS: constexpr):
    """The number at a place of the vector that `_pack` was given, in the upper bits of a byte."""
    number = place // part
    k = place - number * part
    if BITS == 3:
        row = number // 3
        column = number - 3 * row
        upper = tl.load(packed + row * part + k).to(tl.int32) << (3 * column)
        lowest = tl.load(packed + 2 * part + k, (column == 2) & (row < 2), 0).to(tl.int32)
        return (upper & 0xE0) | ((lowest << (4 + row)) & 0x20)
    else:
        return (tl.load(packed + k).to(tl.int32) << (number * BITS)) & (0x100 - (1 << (8 - BITS)))


@triton.jit
def _move(
    values,
    packed,
    residues,
    checks,
    common,
    seen,
    signs,
    weights,
    part,
    weight,
    BITS: constexpr,
    CLIP: constexpr,
    SHIFT: constexpr,
    WIDENING: constexpr,
    TRUST: constexpr,
    UPPER: constexpr,
):
    """Add the weight times the link's difference to a block, and note what it says of its scale."""
    block = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, _BLOCK)
    places = block * _BLOCK + lanes
    scale = tl.load(common + block)
    k = _unpacked(packed, places.to(tl.int32), part, BITS) - tl.load(residues + places).to(tl.int32)
    apart = tl.load(checks + block)
    if UPPER:
        k = -k
    k = (k << 24) >> (32 - BITS)
    holds = _check(k, _weights(weights, scale, lanes)) == apart
    real = k.to(values.dtype.element_ty) + SHIFT
    learnt, size = _learn(real, holds, True, apart, scale, scale * CLIP, BITS, WIDENING, TRUST)
    tl.store(seen + block, tl.maximum(tl.load(seen + block), learnt))
    # Rotated before it is scaled: whole numbers this small add up exactly in any order.
    difference = _turned(real) * tl.load(signs + lanes) * size
    tl.store(values + places, tl.load(values + places) + difference * weight)


@cache
def _tables(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """The rotation's signs with its scale, 1/16, and the checks' weights."""
    table = torch.from_numpy(modulo.check_weights(BLOCK)).to(device, torch.int32)
    return torch.from_numpy(modulo.signs(BLOCK) / 16).to(device, dtype), table


def _run(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Start a kernel where its first argument is, of a warp per program."""
    needed = {name: constants[name] for name in kernel.arg_names if name in constants}
    with torch.cuda.device_of(arguments[0]):
        kernel[grid](*arguments, **needed, num_warps=1)


def _constants(wire: Modulo) -> dict[str, Any]:
    clip = wire.clip_range / wire.half
    return {
        "BITS": wire.bits,
        "CLIP": clip,
        "SHIFT": wire.shift,
        "FINEST": modulo.finest_share(wire, BLOCK),
        "WIDENING": wire.widening,
        "TRUST": modulo.trusted_share(wire, BLOCK),
    }


def meet(
    known: modulo.Scales,
    base: Tensor,
    out: Tensor,
    partner: Tensor,
    move: Tensor,
    met: Tensor,
    filled: Tensor,
) -> None:
    """`kernels.meet`."""
    workers, number = known.sent.shape
    tables = _tables(base.dtype, base.device)
    state = out, partner, move, known.sent, known.seen, known.finest, met, filled
    _run(_meet, (number, workers), base, *state, *tables, number, **_constants(known.wire))


def encode(
    wire: Modulo, values: Tensor, common: Tensor, coded: modulo.Coded, *, lower: bool
) -> None:
    """`modulo.encode`."""
    constants = _constants(wire) | {"UPPER": not lower}
    tables = _tables(values.dtype, values.device)
    residues, body, checks, finest = coded
    state = common, residues, checks, finest
    _run(_encode, (len(values),), values, *state, *tables, **constants)
    if wire.bits == 8:
        body.copy_(residues.view(-1))
        return
    part = _part(wire, values)
    _run(_pack, (-(-part // 256),), residues, body, part, BITS=wire.bits, SIZE=256)


def move(
    wire: Modulo, values: Tensor, arrived: modulo.Arrived, *, lower: bool, weight: float
) -> None:
    """`modulo.move`."""
    tables = _tables(values.dtype, values.device)
    constants = _constants(wire) | {"UPPER": not lower}
    state = *arrived, *tables, _part(wire, values), weight
    _run(_move, (len(values),), values, *state, **constants)


def _part(wire: Modulo, values: Tensor) -> int:
    """How long the parts are that `modulo.pack` lays over one another."""
    return values.numel() // 8 * (1 if wire.bits == 3 else wire.bits)
