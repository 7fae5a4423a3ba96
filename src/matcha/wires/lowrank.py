"""Low-rank messages: the two halves of a step of power iteration for all matrices of a row.

A row is one worker's parameters, or some of them; there may be many rows, one per worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from matcha.wires.shared import DEPENDENT, first_direction
from matcha.wires.wire import FACTOR_BLOCK, LowRank, Segment, matrix_shape


class LowRankRows:
    """Which parameters of a row are sent as factors, and both halves of their messages."""

    def __init__(self, wire: LowRank, segments: Sequence[Segment], x: Tensor) -> None:
        self.wire = wire
        self.matrices = [s for s in segments if wire.is_factored(s.shape)]
        self.vectors = [s for s in segments if not wire.is_factored(s.shape)]
        shapes = [matrix_shape(s.shape) for s in self.matrices]
        self.left = Factors([rows for rows, _ in shapes], wire.rank, x)
        self.right = Factors([columns for _, columns in shapes], wire.rank, x)
        self._source, self._place, size = self._vector_places(x.device)
        self._first = torch.zeros(len(x), self.left.size + size, dtype=x.dtype, device=x.device)
        self._second = torch.zeros(len(x), self.right.size, dtype=x.dtype, device=x.device)
        self.start = self.right.stack([first_direction(c, wire.rank) for _, c in shapes])
        """The directions q before a link's first meeting."""

    def _vector_places(self, device: torch.device) -> tuple[Tensor, Tensor, int]:
        source, place, end = [], [], self.left.size
        for segment in self.vectors:
            source.append(torch.arange(segment.offset, segment.offset + segment.size))
            place.append(torch.arange(end, end + segment.size))
            end += -(-segment.size // FACTOR_BLOCK) * FACTOR_BLOCK
        if not source:
            source, place = [torch.zeros(0, dtype=torch.long)], [torch.zeros(0, dtype=torch.long)]
        return torch.cat(source).to(device), torch.cat(place).to(device), end - self.left.size

    def first_messages(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What both halves hold before anybody met, for the first scales."""
        sides = [first_direction(matrix_shape(s.shape)[0], self.wire.rank) for s in self.matrices]
        second = self.left.stack(sides).expand(len(x), -1, -1, -1)
        start = self.start.expand(len(x), -1, -1, -1)
        return self.first_half(x, start).clone(), self.second_half(x, second).clone()

    def _views(self, x: Tensor) -> Iterator[Tensor]:
        for s in self.matrices:
            yield x.narrow(1, s.offset, s.size).view(len(x), *matrix_shape(s.shape))

    def first_half(self, base: Tensor, q: Tensor) -> Tensor:
        """X·q of every matrix, and vectors whole, in blocks."""
        for k, view in enumerate(self._views(base)):
            self.left.place(self._first, k).copy_(torch.bmm(view, self.right.part(q, k)))
        self._first.index_copy_(1, self._place, base.index_select(1, self._source))
        return self._first.view(len(base), -1, FACTOR_BLOCK)

    def sides(self, first: Tensor) -> Tensor:
        """P of every matrix, orthonormal, from the difference of the first halves."""
        return orthonormal(self.left.gather(first))

    def second_half(self, base: Tensor, p: Tensor) -> Tensor:
        """Xᵀ·p of every matrix, in blocks."""
        for k, view in enumerate(self._views(base)):
            part = self.left.part(p, k)
            self.right.place(self._second, k).copy_(torch.bmm(view.transpose(1, 2), part))
        return self._second.view(len(base), -1, FACTOR_BLOCK)

    def move(self, out: Tensor, first: Tensor, p: Tensor, s: Tensor | None, move: Tensor) -> None:
        """Add each row's signed weight times the difference that both ends know."""
        if s is not None:
            for k, view in enumerate(self._views(out)):
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
        self.offsets = [0, *accumulate(sizes)]
        self.size = self.offsets[-1]
        self.longest = max(lengths, default=0)
        self._like = like
        index = torch.full((len(lengths), self.longest * rank), self.size)
        for k, (n, offset) in enumerate(zip(lengths, self.offsets, strict=False)):
            index[k, : n * rank] = torch.arange(offset, offset + n * rank)
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

    def stack(self, factors: Sequence[object]) -> Tensor:
        """Numpy factors as a stack without a worker axis."""
        shape = len(self.lengths), self.longest, self.rank
        stack = torch.zeros(shape, dtype=self._like.dtype, device=self._like.device)
        for k, factor in enumerate(factors):
            stack[k, : self.lengths[k]] = torch.as_tensor(factor, dtype=stack.dtype)
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


def renew_directions(directions: Tensor, s: Tensor) -> Tensor:
    """The directions for the next meeting; where nothing came through, the old ones."""
    found = orthonormal(s)
    return torch.where((found != 0).any(-2, keepdim=True), found, directions)
