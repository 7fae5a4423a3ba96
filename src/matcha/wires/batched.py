"""Meetings of all workers of a simulation at once: a row a worker, fixed shapes, no host.

A matching is two vectors over the workers: `partner` (oneself at rest) and `move` (plus the weight
at a link's lower end, minus it at the upper, 0 at rest). Everything is done for every worker, so a
captured CUDA graph serves any matching; resting workers meet themselves and are left as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from matcha.topology import Link
from matcha.wires import modulo
from matcha.wires.definition import DEPENDENT, first_direction
from matcha.wires.wire import BLOCK, FACTOR_BLOCK, Float, LowRank, Modulo, Wire, matrix_shape

_CHUNK = 1 << 16  # values a pass on a CPU: what it works on stays in the cache


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A parameter's place in a flat row; places start at multiples of `BLOCK`."""

    offset: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many values it has."""
        rows, columns = matrix_shape(self.shape)
        return rows * columns


class Meetings(Protocol):
    """Rounds of one wire over a matrix of workers; what it remembers is in `state`."""

    state: dict[str, Tensor]

    def reset(self, x: Tensor) -> None:
        """Start afresh from the workers' values."""

    def begin(self) -> None:
        """A round begins."""

    def meet(self, base: Tensor, out: Tensor, partner: Tensor, move: Tensor) -> None:
        """One matching: add each worker's move to `out`, from the values in `base`."""

    def end(self) -> None:
        """The round has ended."""


def meetings_of(
    wire: Wire, segments: Sequence[Segment], x: Tensor, links: Sequence[Link]
) -> Meetings:
    """The meetings of a wire for the rows of `x`, whose parameters lie in these places."""
    if isinstance(wire, Modulo):
        return ModuloMeetings(wire, segments, x)
    if isinstance(wire, LowRank):
        return LowRankMeetings(wire, segments, x, links)
    return FloatMeetings(wire)


class FloatMeetings:
    """Whole values, rounded to the wire's format."""

    def __init__(self, wire: Float) -> None:
        self.wire = wire
        self.state: dict[str, Tensor] = {}

    def reset(self, x: Tensor) -> None:
        """Nothing is remembered."""

    def begin(self) -> None:
        """Nothing to prepare."""

    def meet(self, base: Tensor, out: Tensor, partner: Tensor, move: Tensor) -> None:
        """Each end moves by its weight times the difference of the two messages."""
        sent = base.to(torch.bfloat16) if self.wire.name == "bfloat16" else base
        difference = sent.index_select(0, partner).to(base.dtype).sub_(sent)
        out.addcmul_(difference, move.abs().unsqueeze(1))

    def end(self) -> None:
        """Nothing is learnt."""


class Differences:
    """What partners learn of their difference by modulo messages, block by block.

    Args:
        wire: how many bits.
        blocks: the first values of all workers, workers × blocks × values.
        name: of its entries in a `state`.
    """

    def __init__(self, wire: Modulo, blocks: Tensor, name: str = "") -> None:
        self.wire = wire
        scales = modulo.first_scales(blocks)
        self.scales, self.sent = scales, modulo.sent_scales(scales)
        self.seen, self.finest = torch.zeros_like(scales), torch.zeros_like(scales)
        self.met = torch.zeros(len(scales), 1, dtype=torch.bool, device=scales.device)
        self.state = {f"{name}scales": self.scales}

    def reset(self, blocks: Tensor) -> None:
        """Start afresh."""
        self.scales.copy_(modulo.first_scales(blocks))

    def begin(self) -> None:
        """Scales are told once a round."""
        self.sent.copy_(modulo.sent_scales(self.scales))
        self.seen.zero_()
        self.finest.zero_()
        self.met.zero_()

    def between(self, blocks: Tensor, partner: Tensor, move: Tensor, part: slice) -> Tensor:
        """Upper minus lower end of each worker's link, as both know it, for a part of the blocks.

        Zeros for workers at rest.
        """
        wire, sent = self.wire, self.sent[:, part]
        sign = torch.sign(move)[:, None, None]
        common = torch.maximum(sent, sent.index_select(0, partner))
        step = modulo.grid(common, wire)
        y = modulo.rotate(blocks)
        finest = modulo.finest_scales(y, wire).nan_to_num_(0.0, 0.0)
        shift: Tensor | float = (sign < 0) * wire.shift if wire.shift else 0.0
        n = modulo.levels(y, step, shift)
        apart = n.index_select(0, partner).sub_(n).mul_(sign)
        k = modulo.wrap(apart, wire)
        # The sums that travel differ by Σk modulo 2^16 unless something wrapped.
        ok = torch.remainder(apart.sub_(k).sum(-1), modulo.CHECK) == 0
        k = torch.where(ok.unsqueeze(-1), k + wire.shift if wire.shift else k, 0.0)
        met = (move != 0).unsqueeze(1)
        if wire.shift:
            k.mul_(met.unsqueeze(-1))
        seen = modulo.seen_scales(k, ok, common, wire).mul_(met)
        self.seen[:, part].copy_(torch.maximum(self.seen[:, part], seen))
        self.finest[:, part].copy_(torch.maximum(self.finest[:, part], finest))
        self.met.logical_or_(met)
        return modulo.unrotate(k.mul_(step.unsqueeze(-1)))

    def end(self) -> None:
        """Those who met somebody learn from it."""
        learnt = modulo.next_scales(self.scales, self.seen, self.finest)
        self.scales.copy_(torch.where(self.met, learnt, self.scales))


class ModuloMeetings:
    """All parameters as modulo messages in blocks of 256."""

    def __init__(self, wire: Modulo, segments: Sequence[Segment], x: Tensor) -> None:
        blocks = self._blocks(x)
        self.differences = Differences(wire, blocks)
        self.state = self.differences.state
        # Padding is zero and stays zero, though a rotated message moves it too.
        self.mask = torch.zeros(x.shape[1], dtype=x.dtype, device=x.device)
        for segment in segments:
            self.mask[segment.offset : segment.offset + segment.size] = 1.0
        self.mask = self.mask.view(-1, BLOCK)
        number = len(self.mask)
        chunk = number if x.is_cuda else max(1, _CHUNK // (BLOCK * len(x)))
        self._parts = [slice(k, min(k + chunk, number)) for k in range(0, number, chunk)]

    @staticmethod
    def _blocks(x: Tensor) -> Tensor:
        return x.view(len(x), -1, BLOCK)

    def reset(self, x: Tensor) -> None:
        """Start afresh from the workers' values."""
        self.differences.reset(self._blocks(x))

    def begin(self) -> None:
        """A round begins."""
        self.differences.begin()

    def meet(self, base: Tensor, out: Tensor, partner: Tensor, move: Tensor) -> None:
        """One matching: add each worker's move to `out`, from the values in `base`."""
        values, moved = self._blocks(base), self._blocks(out)
        for part in self._parts:
            found = self.differences.between(values[:, part], partner, move, part)
            moved[:, part].addcmul_(found.mul_(self.mask[part]), move[:, None, None])

    def end(self) -> None:
        """The round has ended."""
        self.differences.end()


class LowRankMeetings:
    """Weight matrices by their strongest directions, everything else whole, all in 8 bits."""

    def __init__(
        self, wire: LowRank, segments: Sequence[Segment], x: Tensor, links: Sequence[Link]
    ) -> None:
        self.wire, self.num_workers, self._like = wire, len(x), x
        self.matrices = [s for s in segments if wire.is_factored(s.shape)]
        self.vectors = [s for s in segments if not wire.is_factored(s.shape)]
        shapes = [matrix_shape(s.shape) for s in self.matrices]
        self.left = Factors([rows for rows, _ in shapes], wire.rank, x)
        self.right = Factors([columns for _, columns in shapes], wire.rank, x)
        self._source, self._place, size = self._vector_places(x.device)
        self._first = torch.zeros(len(x), self.left.size + size, dtype=x.dtype, device=x.device)
        self._second = torch.zeros(len(x), self.right.size, dtype=x.dtype, device=x.device)
        self._link = torch.full((len(x), len(x)), len(links), device=x.device)
        for number, (i, j) in enumerate(links):
            self._link[i, j] = self._link[j, i] = number
        self._workers = torch.arange(len(x), device=x.device)
        start = self.right.stacked([first_direction(c, wire.rank) for _, c in shapes])
        self._start = start
        self.directions = start.repeat(len(links) + 1, 1, 1, 1)
        """A link's last directions, warm for its next meeting; one row more for those at rest."""
        first, second = self._first_messages(x)
        self.first = Differences(wire.factors, first, "first_")
        self.second = Differences(wire.factors, second, "second_")
        self.state = {"directions": self.directions, **self.first.state, **self.second.state}

    def _vector_places(self, device: torch.device) -> tuple[Tensor, Tensor, int]:
        source, place, end = [], [], self.left.size
        for segment in self.vectors:
            source.append(torch.arange(segment.offset, segment.offset + segment.size))
            place.append(torch.arange(end, end + segment.size))
            end += -(-segment.size // FACTOR_BLOCK) * FACTOR_BLOCK
        if not source:
            source, place = [torch.zeros(0, dtype=torch.long)], [torch.zeros(0, dtype=torch.long)]
        return torch.cat(source).to(device), torch.cat(place).to(device), end - self.left.size

    def _first_messages(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What both halves hold before anybody met, for the first scales."""
        sides = [first_direction(matrix_shape(s.shape)[0], self.wire.rank) for s in self.matrices]
        second = self.left.stacked(sides).expand(len(x), -1, -1, -1)
        start = self._start.expand(len(x), -1, -1, -1)
        return self._first_half(x, start).clone(), self._second_half(x, second).clone()

    def _views(self, x: Tensor) -> Iterator[Tensor]:
        for s in self.matrices:
            yield x.narrow(1, s.offset, s.size).view(len(x), *matrix_shape(s.shape))

    def _first_half(self, base: Tensor, q: Tensor) -> Tensor:
        """X·q of every matrix, and vectors whole, in blocks."""
        for k, view in enumerate(self._views(base)):
            self.left.place(self._first, k).copy_(torch.bmm(view, self.right.part(q, k)))
        self._first.index_copy_(1, self._place, base.index_select(1, self._source))
        return self._first.view(len(base), -1, FACTOR_BLOCK)

    def _second_half(self, base: Tensor, p: Tensor) -> Tensor:
        """Xᵀ·p of every matrix, in blocks."""
        for k, view in enumerate(self._views(base)):
            part = self.left.part(p, k)
            self.right.place(self._second, k).copy_(torch.bmm(view.transpose(1, 2), part))
        return self._second.view(len(base), -1, FACTOR_BLOCK)

    def reset(self, x: Tensor) -> None:
        """Start afresh from the workers' values."""
        self.directions.copy_(self._start.expand_as(self.directions))
        first, second = self._first_messages(x)
        self.first.reset(first)
        self.second.reset(second)

    def begin(self) -> None:
        """A round begins."""
        self.first.begin()
        self.second.begin()

    def meet(self, base: Tensor, out: Tensor, partner: Tensor, move: Tensor) -> None:
        """One matching: p = Dq, then s = Dᵀp, then both ends move along p sᵀ."""
        whole = slice(None)
        link = self._link[self._workers, partner]
        q = self.directions.index_select(0, link)
        first = self.first.between(self._first_half(base, q), partner, move, whole).flatten(1)
        p = orthonormal(self.left.gathered(first))
        moves = first.index_select(1, self._place).mul_(move.unsqueeze(1))
        if self.matrices:
            half = self._second_half(base, p)
            second = self.second.between(half, partner, move, whole).flatten(1)
            s = self.right.gathered(second)
            weight = move[:, None, None]
            for k, view in enumerate(self._views(out)):
                factor = self.right.part(s, k).transpose(1, 2)
                view.add_(torch.bmm(self.left.part(p, k) * weight, factor))
            # Both ends of a link write the same values to its row.
            self.directions.index_copy_(0, link, renewed(q, s))
        out.index_add_(1, self._source, moves)

    def end(self) -> None:
        """The round has ended."""
        self.first.end()
        self.second.end()


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

    def gathered(self, flat: Tensor) -> Tensor:
        """A flat message as a stack: workers × matrices × longest × rank."""
        padded = torch.cat([flat[:, : self.size], self._zero], 1)
        shape = len(flat), len(self.lengths), self.longest, self.rank
        return padded.index_select(1, self._index).view(shape)

    def part(self, stack: Tensor, k: int) -> Tensor:
        """Matrix k's factor in a stack."""
        return stack[:, k, : self.lengths[k]]

    def stacked(self, factors: Sequence[object]) -> Tensor:
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


def renewed(directions: Tensor, s: Tensor) -> Tensor:
    """The directions for the next meeting; where nothing came through, the old ones."""
    found = orthonormal(s)
    return torch.where((found != 0).any(-2, keepdim=True), found, directions)
