"""What a meeting does to two vectors, wire by wire: the oracle of the kernels and both engines.

Written for reading, in plain numpy, one link after another. `matcha.wires.modulo` and its
neighbours do the same operations on tensors, many blocks or many workers at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from matcha.rounds import Round
from matcha.topology import Link
from matcha.wires.lowrank import first_direction, orthonormal_columns
from matcha.wires.modulo import FADE, FINEST, FIRST, LEAST, ORDERS, check_weights, hadamard, signs
from matcha.wires.wire import (
    BLOCK,
    FACTOR_BLOCK,
    Float,
    LowRank,
    Modulo,
    Shape,
    Wire,
    matrix_shape,
)

Array = npt.NDArray[Any]
Memory = dict[str, Array]


def order_of(common: Array) -> Array:
    """Which order of weights a meeting's blocks have: by their scales, which both ends know."""
    bits: Array = (common.astype(np.float32).view(np.uint32) >> 16) % ORDERS
    return bits


def rotate(x: Array) -> Array:
    """Blocks (the last axis) turned so that no value stands out."""
    block = x.shape[-1]
    h = hadamard(math.isqrt(block)).astype(x.dtype)
    squares = (x * signs(block).astype(x.dtype)).reshape(*x.shape[:-1], len(h), len(h))
    turned: Array = (h @ squares @ h).reshape(x.shape)
    return turned


def unrotate(y: Array) -> Array:
    """The inverse of `rotate`."""
    block = y.shape[-1]
    h = hadamard(math.isqrt(block)).astype(y.dtype)
    squares = y.reshape(*y.shape[:-1], len(h), len(h))
    back: Array = (h @ squares @ h).reshape(y.shape) * signs(block).astype(y.dtype)
    return back


def to_blocks(vectors: Sequence[Array], block: int) -> Array:
    """Vectors one after another, each filled up with zeros to whole blocks."""
    padded = [np.pad(v, (0, -len(v) % block)) for v in vectors]
    return np.concatenate(padded).reshape(-1, block)


def from_blocks(blocks: Array, lengths: Sequence[int]) -> list[Array]:
    """The vectors of these lengths that `to_blocks` was given."""
    block, start, found = blocks.shape[-1], 0, []
    for length in lengths:
        number = -(-length // block)
        found.append(blocks[start : start + number].ravel()[:length])
        start += number
    return found


def rounded_scale(scales: Array) -> Array:
    """Scales as they travel, in bfloat16: float32 with its lower 16 bits rounded away."""
    bits = scales.astype(np.float32).view(np.uint32)
    even = ((bits >> 16) & 1) + 0x7FFF
    kept: Array = ((bits + even) & np.uint32(0xFFFF0000)).view(np.float32).astype(scales.dtype)
    return kept


def shrinkage(mean_square: Array, wire: Modulo) -> Array:
    """The share of a block's seen difference to move by: rounding adds to it what is not there.

    `matcha.wires.modulo.shrinkage` derives it.

    Args:
        mean_square: of a block's k, in steps.
        wire: how many bits.
    """
    with np.errstate(divide="ignore"):
        coarse = np.maximum(1 - 1 / (6 * mean_square), 0)
    if wire.shift:
        share = np.minimum(coarse, 2.5 * np.sqrt(np.maximum(mean_square - 0.25, 0)))
    else:
        share = np.maximum(coarse, np.minimum(math.pi / 2 * mean_square, 0.5))
    root: Array = np.sqrt(share)
    return root


class Scales:
    """A worker's scales, one per block, and what a round's meetings say of them."""

    def __init__(self, blocks: Array, wire: Modulo) -> None:
        self.wire = wire
        rms = np.sqrt((blocks**2).mean(-1))
        self.held = np.maximum(rms * FIRST, LEAST).astype(blocks.dtype)
        self.seen = np.zeros_like(self.held)
        self.finest = np.zeros_like(self.held)
        self.met = False

    @property
    def sent(self) -> Array:
        """As the partner hears them."""
        return rounded_scale(self.held)

    def note(self, seen: Array, squares: Array) -> None:
        """Keep what a meeting saw until the round ends."""
        finest = np.sqrt(squares) * FINEST * self.wire.half / self.wire.clip_range
        self.seen = np.maximum(self.seen, seen)
        self.finest = np.maximum(self.finest, finest)
        self.met = True

    def end_round(self) -> None:
        """Scales change after the round, so that all its messages can be under way at once."""
        if self.met:
            held = np.maximum(self.held * FADE, np.maximum(self.seen, self.finest))
            self.held = held.astype(self.held.dtype)
            self.seen, self.finest, self.met = self.seen * 0, self.finest * 0, False


def modulo_difference(
    wire: Modulo, lower: Array, upper: Array, scales: tuple[Scales, Scales]
) -> Array:
    """The difference upper − lower as both ends of a link come to know it; blocks are rows.

    Each end sends its whole numbers modulo 2^b. The difference of the two residues, wrapped to
    [−2^(b−1), 2^(b−1)), is k; weighted sums sent beside them tell blocks in which a value wrapped.
    """
    common = np.maximum(scales[0].sent, scales[1].sent)
    step = common * lower.dtype.type(wire.clip_range / wire.half)
    y = rotate(lower), rotate(upper)
    shifts = 0.0, wire.shift
    n = [np.round(v / step[:, None] - shift) for v, shift in zip(y, shifts, strict=True)]
    finite = [np.isfinite(v).all(-1) for v in n]
    residue = [np.where(np.isfinite(v), v, 0) % (2 * wire.half) for v in n]
    k = (residue[1] - residue[0] + wire.half) % (2 * wire.half) - wire.half
    weights = check_weights(lower.shape[-1])[order_of(common)]
    checks = [(np.where(np.isfinite(v), v, 0) * weights).sum(-1) for v in n]
    apart = checks[1] - checks[0]
    ok = ((apart - (k * weights).sum(-1)) % 2**32 == 0) & finite[0] & finite[1]
    k += wire.shift
    mean_square = (k**2).mean(-1)
    seen = np.sqrt(np.maximum(mean_square - 1 / 6, 0)) * step
    # The checks' difference is a weighted sum of all differences, wrapped or not: where the window
    # was too narrow it still tells how large they are, from a sample of one.
    whole = (apart + 2**31) % 2**32 - 2**31
    guessed = wire.failure_trust * np.abs(whole) / np.sqrt((weights[0] ** 2).sum()) * step
    wider = np.maximum(common * wire.widening, np.where(finite[0] & finite[1], guessed, 0))
    seen = np.where(ok, seen, wider).astype(lower.dtype)
    for end, value in zip(scales, y, strict=True):
        squares = (value**2).mean(-1)
        end.note(seen, np.where(np.isfinite(squares), squares, 0))
    step = np.where(ok, step * shrinkage(mean_square, wire), 0)
    return unrotate((k * step[:, None]).astype(lower.dtype))


def renew_directions(directions: Array, s: Array) -> Array:
    """The directions for the next meeting; where nothing came through, the old ones."""
    found = orthonormal_columns(s)
    kept: Array = np.where((found != 0).any(0), found, directions)
    return kept


class Definition:
    """Rounds over a wire, for all workers at once: values in, values out, memory kept between.

    Args:
        wire: what messages hold.
        shapes: of the parameters that make up a row, one after another.
        x: the workers' first values, a row each.

    >>> x = np.array([[0.0, 1.0], [2.0, 1.0]])
    >>> swap = Round(matchings=(((0, 1),),), indices=(0,), mixing="pairwise", weight=0.5)
    >>> Definition(Float(), [(2,)], x).mix(swap, x)
    array([[1., 1.],
           [1., 1.]])
    """

    def __init__(self, wire: Wire, shapes: Sequence[Shape], x: Array) -> None:
        self.wire, self.shapes = wire, [tuple(shape) for shape in shapes]
        self.lengths = [math.prod(shape) for shape in self.shapes]
        self._directions: dict[Link, list[Array]] = {}
        self.scales: list[tuple[Scales, ...]] = []
        if isinstance(wire, Modulo):
            self.scales = [(Scales(self._blocks(row), wire),) for row in x]
        elif isinstance(wire, LowRank):
            first = [self._first_halves(wire, row, self._starts(wire, x.dtype)) for row in x]
            sides = self._starts(wire, x.dtype, axis=0)
            second = [self._second_halves(wire, row, sides) for row in x]
            self.scales = [
                tuple(Scales(to_blocks(part, FACTOR_BLOCK), wire.factors) for part in parts)
                for parts in zip(first, second, strict=True)
            ]

    def mix(self, round: Round, x: Array) -> Array:
        """The workers' values after a round; `x` is left alone."""
        mixed: Array = x.copy()
        for position, matching in enumerate(round.matchings):
            for link, weight in zip(matching, round.shares(position), strict=True):
                i, j = link
                base = x if round.mixing == "laplacian" else mixed
                move = self._difference(link, base[i], base[j])
                w = x.dtype.type(weight)
                mixed[i] += w * move
                mixed[j] -= w * move
        for scales in self.scales:
            for part in scales:
                part.end_round()
        return mixed

    def _difference(self, link: Link, lower: Array, upper: Array) -> Array:
        wire = self.wire
        if isinstance(wire, Float):
            if wire.name == "bfloat16":
                lower, upper = (rounded_scale(v) for v in (lower, upper))
            difference: Array = upper - lower
            return difference
        if isinstance(wire, Modulo):
            scales = self.scales[link[0]][0], self.scales[link[1]][0]
            ends = self._blocks(lower), self._blocks(upper)
            found = modulo_difference(wire, *ends, scales)
            return np.concatenate(from_blocks(found, self.lengths))
        return self._low_rank(wire, link, lower, upper)

    def _blocks(self, row: Array) -> Array:
        return to_blocks(np.split(row, np.cumsum(self.lengths)[:-1]), BLOCK)

    # -- low rank ------------------------------------------------------------------------------

    def _low_rank(self, wire: LowRank, link: Link, lower: Array, upper: Array) -> Array:
        """One step of power iteration for D = upper − lower: p = Dq, then s = Dᵀp, move p sᵀ."""
        q = self._directions.get(link) or self._starts(wire, lower.dtype)
        p = self._agree(link, 0, [self._first_halves(wire, v, q) for v in (lower, upper)])
        sides = [
            orthonormal_columns(v.reshape(-1, wire.rank)) if wire.is_factored(shape) else v
            for v, shape in zip(p, self.shapes, strict=True)
        ]
        s = self._agree(link, 1, [self._second_halves(wire, v, sides) for v in (lower, upper)])
        moves, directions = [], []
        found = iter(s)
        for side, shape, last in zip(sides, self.shapes, q, strict=True):
            if not wire.is_factored(shape):
                moves.append(side)
                directions.append(last)
                continue
            factor = next(found).reshape(-1, wire.rank)
            moves.append((side @ factor.T).ravel())
            directions.append(renew_directions(last, factor))
        self._directions[link] = directions
        return np.concatenate(moves)

    def _agree(self, link: Link, half: int, parts: list[list[Array]]) -> list[Array]:
        assert isinstance(self.wire, LowRank)
        lengths = [len(part) for part in parts[0]]
        if not lengths:
            return []
        lower, upper = (to_blocks(part, FACTOR_BLOCK) for part in parts)
        scales = self.scales[link[0]][half], self.scales[link[1]][half]
        return from_blocks(modulo_difference(self.wire.factors, lower, upper, scales), lengths)

    def _parameters(self, row: Array) -> list[tuple[Shape, Array]]:
        pieces = np.split(row, np.cumsum(self.lengths)[:-1])
        return list(zip(self.shapes, pieces, strict=True))

    def _first_halves(self, wire: LowRank, row: Array, q: Sequence[Array]) -> list[Array]:
        return [
            (v.reshape(matrix_shape(shape)) @ direction).ravel() if wire.is_factored(shape) else v
            for (shape, v), direction in zip(self._parameters(row), q, strict=True)
        ]

    def _second_halves(self, wire: LowRank, row: Array, sides: Sequence[Array]) -> list[Array]:
        return [
            (v.reshape(matrix_shape(shape)).T @ side).ravel()
            for (shape, v), side in zip(self._parameters(row), sides, strict=True)
            if wire.is_factored(shape)
        ]

    def _starts(self, wire: LowRank, dtype: Any, axis: int = 1) -> list[Array]:
        return [
            first_direction(matrix_shape(shape)[axis], wire.rank).astype(dtype)
            for shape in self.shapes
        ]
