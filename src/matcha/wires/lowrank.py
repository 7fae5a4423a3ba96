"""Low-rank messages: the two halves of a step of power iteration for all matrices of a row.

A row is one worker's parameters, or some of them; there may be many rows, one per worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from matcha.wires.modulo import TURN, Array
from matcha.wires.wire import FACTOR_BLOCK, LowRank, Segment, matrix_shape

DEPENDENT = 1e-4
"""A column that others explain but for this share of its length adds only rounding errors."""


class LowRankRows:
    """Which parameters of a row are sent as factors, and both halves of their messages."""

    def __init__(self, wire: LowRank, segments: Sequence[Segment], x: Tensor) -> None:
        self.rank = wire.rank
        self.matrices = [s for s in segments if wire.is_factored(s.shape)]
        self._shapes = [matrix_shape(s.shape) for s in self.matrices]
        self.left = Factors([rows for rows, _ in self._shapes], wire.rank, x)
        self.right = Factors([columns for _, columns in self._shapes], wire.rank, x)
        vectors = [s for s in segments if not wire.is_factored(s.shape)]
        sizes = [-(-s.size // FACTOR_BLOCK) * FACTOR_BLOCK for s in vectors]
        *ends, size = accumulate(sizes, initial=self.left.size)
        none = torch.zeros(0, dtype=torch.long)
        source = [torch.arange(s.offset, s.offset + s.size) for s in vectors]
        place = [torch.arange(end, end + s.size) for s, end in zip(vectors, ends, strict=True)]
        self._source, self._place = (torch.cat([none, *p]).to(x.device) for p in (source, place))
        self._first = torch.zeros(len(x), size, dtype=x.dtype, device=x.device)
        self._second = torch.zeros(len(x), self.right.size, dtype=x.dtype, device=x.device)
        self.start = self.right.stack([first_direction(n, wire.rank) for _, n in self._shapes])
        """The directions q before a link's first meeting."""

    def first_messages(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What both halves hold before anyone met, for the first scales."""
        second = self.left.stack([first_direction(n, self.rank) for n, _ in self._shapes])
        p, q = (each.expand(len(x), -1, -1, -1) for each in (second, self.start))
        return self.first_half(x, q).clone(), self.second_half(x, p).clone()

    def _views(self, x: Tensor) -> Iterator[tuple[int, Tensor]]:
        for k, (s, shape) in enumerate(zip(self.matrices, self._shapes, strict=True)):
            yield k, x.narrow(1, s.offset, s.size).view(len(x), *shape)

    def first_half(self, base: Tensor, q: Tensor) -> Tensor:
        """X·q of every matrix, and vectors whole, in blocks."""
        for k, view in self._views(base):
            self.left.place(self._first, k).copy_(torch.bmm(view, self.right.part(q, k)))
        self._first.index_copy_(1, self._place, base.index_select(1, self._source))
        return self._first.view(len(base), -1, FACTOR_BLOCK)

    def sides(self, first: Tensor) -> Tensor:
        """P of every matrix, orthonormal, from the difference of the first halves."""
        return orthonormal(self.left.gather(first))

    def second_half(self, base: Tensor, p: Tensor) -> Tensor:
        """Xᵀ·p of every matrix, in blocks."""
        for k, view in self._views(base):
            part = self.left.part(p, k)
            self.right.place(self._second, k).copy_(torch.bmm(view.transpose(1, 2), part))
        return self._second.view(len(base), -1, FACTOR_BLOCK)

    def move(self, out: Tensor, first: Tensor, p: Tensor, s: Tensor | None, move: Tensor) -> None:
        """Add each row's signed weight times the difference that both ends know."""
        if s is not None:
            for k, view in self._views(out):
                factor = self.right.part(s, k).transpose(1, 2)
                view.add_(torch.bmm(self.left.part(p, k) * move[:, None, None], factor))
        moves = first.index_select(1, self._place).mul_(move.unsqueeze(1))
        out.index_add_(1, self._source, moves)


class Factors:
    """One side's factors of all matrices: a flat message in blocks, and a stack padded with zeros.

    The stack lets one kernel serve all matrices, which is what makes low rank quick on a GPU.
    """

    def __init__(self, lengths: Sequence[int], rank: int, like: Tensor) -> None:
        self.lengths, self.rank = lengths, rank
        sizes = [-(-n * rank // FACTOR_BLOCK) * FACTOR_BLOCK for n in lengths]
        *self.offsets, self.size = accumulate(sizes, initial=0)
        self.longest = max(lengths, default=0)
        index = torch.full((len(lengths), self.longest * rank), self.size)
        for row, n, offset in zip(index, lengths, self.offsets, strict=True):
            row[: n * rank] = torch.arange(offset, offset + n * rank)
        self._index = index.flatten().to(like.device)
        self._zero = torch.zeros(len(like), 1, dtype=like.dtype, device=like.device)

    def place(self, flat: Tensor, k: int) -> Tensor:
        """Where matrix k's factor stands in a flat message: workers × length × rank."""
        n = self.lengths[k]
        return flat.narrow(1, self.offsets[k], n * self.rank).view(len(flat), n, self.rank)

    def gather(self, flat: Tensor) -> Tensor:
        """A flat message as a stack: workers × matrices × longest × rank."""
        padded = torch.cat([flat[:, : self.size], self._zero], 1)
        shape = len(flat), len(self.lengths), self.longest, self.rank
        return padded.index_select(1, self._index).view(shape)

    def part(self, stack: Tensor, k: int) -> Tensor:
        """Matrix k's factor in a stack."""
        return stack[:, k, : self.lengths[k]]

    def stack(self, factors: Sequence[Array]) -> Tensor:
        """Numpy factors as a stack without a worker axis."""
        stack = self._zero.new_zeros(len(self.lengths), self.longest, self.rank)
        for place, factor in zip(stack, factors, strict=True):
            place[: len(factor)] = torch.from_numpy(factor).to(stack.dtype)
        return stack


def orthonormal(stack: Tensor) -> Tensor:
    """Columns (the last axis) made orthonormal one after another; dependent ones become 0."""
    done: list[Tensor] = []
    for c in range(stack.shape[-1]):
        v = stack[..., c : c + 1]
        before = v.square().sum(-2, keepdim=True).sqrt()
        if done:
            basis = torch.cat(done, -1)
            v = v - basis @ (basis.transpose(-1, -2) @ v)
        length = v.square().sum(-2, keepdim=True).sqrt()
        done.append(torch.where(length > DEPENDENT * before, v / length, 0.0))
    return torch.cat(done, -1)


def orthonormal_columns(p: Array) -> Array:
    """`orthonormal` in numpy."""
    q: Array = p.copy()
    for c in range(q.shape[1]):
        before = np.sqrt((q[:, c] ** 2).sum())
        q[:, c] -= q[:, :c] @ (q[:, :c].T @ q[:, c])
        length = np.sqrt((q[:, c] ** 2).sum())
        q[:, c] = q[:, c] / length if length > DEPENDENT * before else 0
    return q


def first_direction(columns: int, rank: int) -> Array:
    """Where power iteration starts on every link."""
    return orthonormal_columns(np.random.default_rng(TURN).normal(size=(columns, rank)))


def renew_directions(directions: Tensor, s: Tensor) -> Tensor:
    """The directions for the next meeting; where nothing came through, the old ones."""
    found = orthonormal(s)
    return torch.where((found != 0).any(-2, keepdim=True), found, directions)
