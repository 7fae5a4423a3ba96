"""Meetings of all workers of a simulation at once: a row per worker, fixed shapes, no host.

A matching is two vectors over the workers: `partner` (oneself at rest) and `move` (plus the weight
at a link's lower end, minus it at the upper, 0 at rest). Everything is done for every worker, so a
captured CUDA graph serves any matching; resting workers meet themselves and are left as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from matcha.topology import Link
from matcha.wires import kernels, modulo
from matcha.wires.lowrank import LowRankRows, renew_directions
from matcha.wires.wire import BLOCK, Float, LowRank, Modulo, Segment, Wire

_CHUNK = 1 << 16  # values per pass on a CPU: what it works on stays in the cache


class Meetings:
    """Rounds of one wire over a matrix of workers; by default nothing is remembered."""

    def __init__(self, **differences: Differences) -> None:
        self.differences = differences
        self.state = {name: known.scales for name, known in differences.items()}
        """What workers remember, a row per worker."""
        self.link_state: dict[str, Tensor] = {}
        """What links remember."""

    def reset(self, x: Tensor) -> None:
        """Start again from the workers' values."""

    def begin(self) -> None:
        """A round begins."""
        for known in self.differences.values():
            known.begin()

    def meet(self, base: Tensor, out: Tensor, partner: Tensor, move: Tensor) -> None:
        """One matching: add each worker's move to `out`, from the values in `base`."""
        raise NotImplementedError

    def end(self) -> None:
        """The round has ended."""
        for known in self.differences.values():
            known.end()

    def forget(self, links: Sequence[int]) -> None:
        """Drop what some links, by their number, remember: they are new ones now."""


def meetings_of(
    wire: Wire, segments: Sequence[Segment], x: Tensor, links: Sequence[Link]
) -> Meetings:
    """The meetings of a wire for the rows of `x`, whose parameters lie in these places."""
    if isinstance(wire, Modulo):
        return ModuloMeetings(wire, segments, x)
    if isinstance(wire, LowRank):
        return LowRankMeetings(wire, segments, x, links)
    assert isinstance(wire, Float), "a top-k wire has no meetings"
    return FloatMeetings(wire)


class FloatMeetings(Meetings):
    """Whole values, rounded to the wire's format."""

    def __init__(self, wire: Float) -> None:
        super().__init__()
        self.wire = wire

    def meet(self, base: Tensor, out: Tensor, partner: Tensor, move: Tensor) -> None:
        """Each end moves by its weight times the difference of the two messages."""
        sent = base.to(torch.bfloat16) if self.wire.name == "bfloat16" else base
        difference = sent.index_select(0, partner).to(base.dtype).sub_(sent)
        out.addcmul_(difference, move.abs().unsqueeze(1))


class Differences(modulo.Scales):
    """What partners learn of their difference by modulo messages; scales have a row per worker."""

    def __init__(self, wire: Modulo, blocks: Tensor) -> None:
        self.met = torch.zeros(len(blocks), 1, dtype=torch.bool, device=blocks.device)
        super().__init__(wire, blocks)

    def begin(self) -> None:
        super().begin()
        self.met.zero_()

    def between(self, blocks: Tensor, partner: Tensor, move: Tensor, part: slice) -> Tensor:
        """Upper minus lower end of each worker's link, as both know it, for a part of the blocks.

        Zeros for workers at rest.
        """
        wire, block, sent = self.wire, self.block, self.sent[:, part]
        sign = torch.sign(move)[:, None, None]
        common = torch.maximum(sent, sent.index_select(0, partner))
        step = modulo.grid(common, wire)
        y = modulo.rotate(blocks)
        lengths = torch.linalg.vector_norm(y, dim=-1)
        finest = lengths.mul_(modulo.finest_share(wire, block)).nan_to_num_(0.0, 0.0)
        shift: Tensor | float = (sign < 0) * wire.shift if wire.shift else 0.0
        n = modulo.levels(y, step, shift)
        apart = n.index_select(0, partner).sub_(n).mul_(sign)
        k = modulo.wrap(apart, wire)
        order = modulo.orders(common)
        checks = modulo.checks(apart, order)
        # The checks that travel differ by as much as k's own unless something wrapped.
        ok = modulo.checks(apart.sub_(k), order) == 0
        k = torch.where(ok.unsqueeze(-1), k + wire.shift if wire.shift else k, 0.0)
        met = (move != 0).unsqueeze(1)
        if wire.shift:
            k.mul_(met.unsqueeze(-1))
        lengths = torch.linalg.vector_norm(k, dim=-1)
        seen = modulo.seen_scales(lengths, ok, checks, common, wire, block).mul_(met)
        self.seen[:, part].copy_(torch.maximum(self.seen[:, part], seen))
        self.finest[:, part].copy_(torch.maximum(self.finest[:, part], finest))
        self.met.logical_or_(met)
        step.mul_(modulo.shrinkage(lengths, wire, block))
        return modulo.unrotate(k.mul_(step.unsqueeze(-1)))

    def end(self) -> None:
        """End a round: workers that had a meeting adapt their scales."""
        before = self.scales.clone()
        super().end()
        self.scales.copy_(torch.where(self.met, self.scales, before))


class ModuloMeetings(Meetings):
    """All parameters as modulo messages in blocks of 256."""

    def __init__(self, wire: Modulo, segments: Sequence[Segment], x: Tensor) -> None:
        blocks = x.view(len(x), -1, BLOCK)
        self.known = Differences(wire, blocks)
        super().__init__(scales=self.known)
        # Padding is zero and stays zero, though a rotated message moves it too.
        self.mask = torch.zeros(x.shape[1], dtype=x.dtype, device=x.device)
        for segment in segments:
            self.mask[segment.offset : segment.offset + segment.size] = 1.0
        self.mask = self.mask.view(-1, BLOCK)
        self._filled = self.mask.sum(-1).to(torch.int32)
        self._fused = kernels.serving(blocks)
        number = len(self.mask)
        chunk = number if x.is_cuda else max(1, _CHUNK // (BLOCK * len(x)))
        self._parts = [slice(k, min(k + chunk, number)) for k in range(0, number, chunk)]

    def reset(self, x: Tensor) -> None:
        self.known.reset(x.view(len(x), -1, BLOCK))

    def meet(self, base: Tensor, out: Tensor, partner: Tensor, move: Tensor) -> None:
        known = self.known
        if self._fused is not None:
            self._fused.meet(known, base, out, partner, move, known.met, self._filled)
            return
        values, moved = (x.view(len(x), -1, BLOCK) for x in (base, out))
        for part in self._parts:
            found = known.between(values[:, part], partner, move, part)
            moved[:, part].addcmul_(found.mul_(self.mask[part]), move[:, None, None])


class LowRankMeetings(Meetings):
    """Weight matrices by their strongest directions, everything else whole, all in 8 bits."""

    def __init__(
        self, wire: LowRank, segments: Sequence[Segment], x: Tensor, links: Sequence[Link]
    ) -> None:
        self.rows = LowRankRows(wire, segments, x)
        self._link = torch.full((len(x), len(x)), len(links), device=x.device)
        for number, (i, j) in enumerate(links):
            self._link[i, j] = self._link[j, i] = number
        self._workers = torch.arange(len(x), device=x.device)
        self.directions = self.rows.start.repeat(len(links) + 1, 1, 1, 1)
        """A link's last directions, warm for its next meeting; one row more for those at rest."""
        first, second = self.rows.first_messages(x)
        self.first = Differences(wire.factors, first)
        self.second = Differences(wire.factors, second)
        super().__init__(first_scales=self.first, second_scales=self.second)
        self.link_state = {"directions": self.directions}

    def reset(self, x: Tensor) -> None:
        self.directions.copy_(self.rows.start.expand_as(self.directions))
        first, second = self.rows.first_messages(x)
        self.first.reset(first)
        self.second.reset(second)

    def meet(self, base: Tensor, out: Tensor, partner: Tensor, move: Tensor) -> None:
        """One matching: p = Dq, then s = Dᵀp, then both ends move along p sᵀ."""
        rows, whole = self.rows, slice(None)
        link = self._link[self._workers, partner]
        q = self.directions.index_select(0, link)
        first = self.first.between(rows.first_half(base, q), partner, move, whole).flatten(1)
        p = rows.sides(first)
        s = None
        if rows.matrices:
            half = rows.second_half(base, p)
            second = self.second.between(half, partner, move, whole).flatten(1)
            s = rows.right.gather(second)
            # Both ends of a link write the same values to its row.
            self.directions.index_copy_(0, link, renew_directions(q, s))
        rows.move(out, first, p, s, move)

    def forget(self, links: Sequence[int]) -> None:
        self.directions[list(links)] = self.rows.start
