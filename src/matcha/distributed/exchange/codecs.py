"""Codecs: what the messages of an exchange hold, one for each kind of wire.

A codec cuts some flat tensors into pieces. For a piece and a partner it encodes a message from the
values, and applies the partner's to them, once per phase. It knows no transport: `Exchange` does
the rest. The definition of what a round does is `Round.mix`, and over a coded wire
tests/wires/definition.py; codecs do the same operations in the same order. Averages over more than
two workers stand below the codecs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from matcha.distributed.exchange.meeting import Meeting
from matcha.distributed.transports.base import Message, Pending, Tag, Transport
from matcha.distributed.transports.collectives import ring_gather
from matcha.wires import LowRank, Modulo, TopK
from matcha.wires.coding import Coder, Sent
from matcha.wires.lowrank import LowRankRows, renew_directions
from matcha.wires.topk import TopKRows, pack_chosen, spread, unpack_chosen
from matcha.wires.wire import BLOCK, Segment

_CHUNK = 1 << 17  # elements: three passes over a chunk stay in the cache, so memory is read once
_PIECE = 1 << 18  # values: a tenth of a second at 10 Mbit/s, and a few milliseconds of encoding
_HELD = 32  # bytes per value of a piece, over two: memory of four transfers, work, originals


@dataclass(slots=True, eq=False)
class Piece:
    """A contiguous part of the values: what one message carries."""

    index: int
    values: torch.Tensor
    tensor: int = 0
    """Which of the codec's tensors it is a part of."""
    start: int = 0
    """Its first block in that tensor."""
    padding: torch.Tensor | None = None
    """The places of what belongs to no parameter, and stays zero."""


class SpareMemory:
    """Blocks of bytes that are kept for the next message: a round allocates nothing large."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[torch.device, int], list[torch.Tensor]] = defaultdict(list)

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that nothing uses: of all blocks, between rounds."""
        return sum(block.nbytes for blocks in self.blocks.values() for block in blocks)

    def take(self, nbytes: int, device: torch.device, *, pinned: bool = False) -> torch.Tensor:
        """A block for one use."""
        blocks = self.blocks[device, nbytes]
        if blocks:
            return blocks.pop()
        return torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)

    def give(self, blocks: Sequence[torch.Tensor]) -> None:
        """Keep blocks for their next use."""
        for block in blocks:
            self.blocks[block.device, block.nbytes].append(block)


class Memory(NamedTuple):
    """Spare memory for one transfer: for both messages, and what a codec must remember of its."""

    blocks: Sequence[torch.Tensor]
    incoming: torch.Tensor
    outgoing: torch.Tensor
    kept: torch.Tensor


@dataclass(slots=True, eq=False)
class Transfer:
    """A message each way for one piece, in one phase of one meeting."""

    codec: Codec
    piece: Piece
    phase: int
    meeting: Meeting
    is_lower: bool
    """Whether this worker is the lower end of the link."""
    is_sequential: bool
    """Whether a matching sees the result of the one before it (pairwise, push)."""
    original: torch.Tensor
    """The values that messages are made of: those before the round, or as they are."""
    scales: Sequence[torch.Tensor]
    """What both ends agreed on when the meeting began."""
    memory: Memory
    message: torch.Tensor = field(init=False)
    """What is sent."""
    arrived: torch.Tensor = field(init=False)
    """The partner's, as bytes."""
    pending: Pending | None = None
    """None where the message is empty, which both ends know."""
    sent: Sent | None = None
    """What a coder needs to know of its own message."""

    @property
    def signed_weight(self) -> float:
        """The weight of the link's difference, upper minus lower end, at this end."""
        return self.meeting.weight if self.is_lower else -self.meeting.weight


class Codec(ABC):
    """One worker's end of a wire, for some flat tensors."""

    num_phases = 1
    """Messages one after another per piece and meeting; a later one depends on what came before."""
    pieces: Sequence[Piece]
    """What messages carry; the same sizes on every worker."""
    finite: Sequence[torch.Tensor]
    """Tensors whose values must be finite before a round: a NaN would reach all workers."""

    def window(self, *, several: bool) -> int:
        """How many transfers may be under way at once; `several` partners need originals too."""
        return 4

    def is_sound(self, transfer: Transfer) -> bool:
        """Whether what has arrived may be applied: a message on a grid is always finite."""
        return True

    @abstractmethod
    def memory(self, spare: SpareMemory, own: torch.device, wire: torch.device) -> Memory:
        """Memory for a transfer of any piece on a device, whose messages live on `wire`."""

    @abstractmethod
    def encode(self, transfer: Transfer) -> torch.Tensor:
        """The message; both ends' have the same size. Values and originals are left alone."""

    @abstractmethod
    def apply(self, transfer: Transfer) -> None:
        """Change the piece by what has arrived, or prepare the next phase."""

    def end_round(self) -> None:  # noqa: B027
        """End a round in which this worker had a meeting."""

    def state(self) -> Mapping[str, torch.Tensor]:
        """What later rounds depend on."""
        return {}

    def forget(self, peer: int) -> None:  # noqa: B027
        """Drop what is remembered of a link: its two ends must remember the same."""


class FloatCodec(Codec):
    """Whole values, in their own format or rounded to a smaller one.

    Where values are rounded, a worker moves by the weight times the difference of the two messages:
    what rounding took from a message stays with its sender, so the average over workers is kept.
    Messages are at most half of `bucket_bytes`, and spare memory at most twice. Tensors in
    `any_value` may hold infinities and NaN (buffers: a mask of -inf).
    """

    def __init__(
        self,
        values: Sequence[torch.Tensor],
        *,
        bucket_bytes: int,
        dtype: torch.dtype | None = None,
        any_value: Collection[int] = (),
    ) -> None:
        self._dtype = dtype
        self.finite = [value for k, value in enumerate(values) if k not in any_value]
        self._sizes: dict[torch.device, tuple[int, int]] = {}
        self._any_value = frozenset(any_value)
        parts = [
            (part, k)
            for k, value in enumerate(values)
            for part in torch.split(value, max(1, bucket_bytes // 2 // value.element_size()))
        ]
        self.pieces = [Piece(index, *part) for index, part in enumerate(parts)]

    def window(self, *, several: bool) -> int:
        return 2 if several else 4

    def memory(self, spare: SpareMemory, own: torch.device, wire: torch.device) -> Memory:
        """Pinned, so that a GPU copies to and from it without a detour."""
        if own not in self._sizes:
            pieces = [piece for piece in self.pieces if piece.values.device == own]
            size = max(piece.values.numel() * self._format(piece).itemsize for piece in pieces)
            staged = any(self._is_staged(piece, wire) for piece in pieces)
            self._sizes[own] = size, 2 * size if staged else size
        size, total = self._sizes[own]
        block = spare.take(total, wire, pinned=wire.type == "cpu" and own.type == "cuda")
        return Memory([block], incoming=block[:size], outgoing=block[size:], kept=block[:0])

    def encode(self, transfer: Transfer) -> torch.Tensor:
        """The values themselves where they can be sent as they are."""
        memory, original = transfer.memory, transfer.original
        if not self._is_staged(transfer.piece, memory.incoming.device):
            return original
        dtype = self._format(transfer.piece)
        message = memory.outgoing[: original.numel() * dtype.itemsize].view(dtype)
        return message.copy_(original)

    def is_sound(self, transfer: Transfer) -> bool:
        role = transfer.meeting.role
        has_come = transfer.pending is not None and (role is None or role.source is not None)
        if transfer.piece.tensor in self._any_value or not has_come:
            return True
        return is_finite(transfer.arrived.view(transfer.message.dtype))

    def apply(self, transfer: Transfer) -> None:
        x, message, role = transfer.piece.values, transfer.message, transfer.meeting.role
        arrived, weight = transfer.arrived.view(message.dtype), transfer.meeting.weight
        if role is not None:
            # Both ends work out the share from the same message: what one gives, the other gets.
            if role.to is not None:
                x.sub_(message.to(x.device, x.dtype) * role.given)
            if role.source is not None:
                x.add_(arrived.to(x.device, x.dtype) * role.taken)
        elif message.dtype != x.dtype:
            _move(x, arrived, message, weight)
        elif transfer.is_sequential:
            _average(x, arrived.to(x.device), weight)
        else:
            _move(x, arrived, transfer.original, weight)

    def _format(self, piece: Piece) -> torch.dtype:
        own, smaller = piece.values.dtype, self._dtype
        if smaller is None or not own.is_floating_point or smaller.itemsize >= own.itemsize:
            return own
        return smaller

    def _is_staged(self, piece: Piece, device: torch.device) -> bool:
        return piece.values.device != device or self._format(piece) != piece.values.dtype


class ScaledCodec(Codec):
    """What codecs on grids share: their coders' scales open every meeting.

    The largest message is of `num_blocks` blocks.
    """

    def __init__(
        self, values: Sequence[torch.Tensor], coders: Mapping[str, Coder], num_blocks: int
    ) -> None:
        self.finite = list(values)  # scales stand for differences
        self._named, self._coders, self._num_blocks = coders, list(coders.values()), num_blocks

    def begin_round(self) -> torch.Tensor:
        """Begin a round; returns this worker's scales as bytes."""
        for coder in self._coders:
            coder.begin()
        return torch.cat([coder.told().cpu() for coder in self._coders])

    def agree(self, theirs: torch.Tensor) -> Sequence[torch.Tensor]:
        """The scales of a link, from the bytes of the partner's `begin_round`."""
        parts = torch.split(theirs, [2 * len(coder) for coder in self._coders])
        # Copied: what follows an odd number of bytes cannot be seen as numbers of two.
        return [c.common(part.clone()) for c, part in zip(self._coders, parts, strict=True)]

    def memory(self, spare: SpareMemory, own: torch.device, wire: torch.device) -> Memory:
        coder = self._coders[0]
        size = coder.message_bytes(self._num_blocks)
        incoming = spare.take(size, wire)
        block = spare.take(size + self._num_blocks * coder.block, own)
        return Memory([incoming, block], incoming, outgoing=block[:size], kept=block[size:])

    def _write(self, transfer: Transfer, number: int, blocks: torch.Tensor) -> torch.Tensor:
        """A message of blocks, from the piece's first on, by the coder of a number."""
        coder, memory, scales = self._coders[number], transfer.memory, transfer.scales[number]
        message = memory.outgoing[: coder.message_bytes(len(blocks))]
        place, lower = (transfer.piece.start, scales, message), transfer.is_lower
        transfer.sent = coder.encode(blocks, *place, lower=lower, kept=memory.kept)
        return message

    def end_round(self) -> None:
        """Scales follow what the round has shown."""
        for coder in self._coders:
            coder.end()

    def state(self) -> Mapping[str, torch.Tensor]:
        return {f"scales-{name}": coder.scales for name, coder in self._named.items()}


class ModuloCodec(ScaledCodec):
    """Values on a grid as fine as two workers' difference allows, packed bits piece by piece.

    The flat tensors are whole blocks each; segments say where parameters lie in them. Spare memory
    is at most twice `bucket_bytes`, or a few blocks.
    """

    def __init__(
        self,
        values: Sequence[torch.Tensor],
        segments: Sequence[Sequence[Segment]],
        wire: Modulo,
        *,
        bucket_bytes: int,
    ) -> None:
        limit = max(1, min(_PIECE, bucket_bytes // _HELD) // BLOCK)
        self.pieces = list(_blocks(values, segments, limit))
        coders = {f"{k}": Coder(wire, v.view(-1, BLOCK)) for k, v in enumerate(values)}
        super().__init__(values, coders, max(len(piece.values) for piece in self.pieces))

    def encode(self, transfer: Transfer) -> torch.Tensor:
        return self._write(transfer, transfer.piece.tensor, transfer.original)

    def apply(self, transfer: Transfer) -> None:
        piece, sent, arrived = transfer.piece, transfer.sent, transfer.arrived
        assert sent is not None
        coder, weight = self._coders[piece.tensor], transfer.signed_weight
        coder.move(piece.values, sent, arrived, weight=weight)
        if piece.padding is not None:
            piece.values.view(-1).index_fill_(0, piece.padding, 0.0)


class LowRankCodec(ScaledCodec):
    """Two factors of each weight matrix's difference, one per phase; each tensor is a piece.

    A link's directions are remembered from meeting to meeting. In a Laplacian round with several
    partners the originals are a copy of the values.
    """

    num_phases = 2

    def __init__(
        self,
        values: Sequence[torch.Tensor],
        segments: Sequence[Sequence[Segment]],
        wire: LowRank,
        num_workers: int,
    ) -> None:
        self.pieces = [Piece(k, value.view(1, -1), k) for k, value in enumerate(values)]
        self._rows = [
            LowRankRows(wire, places, piece.values)
            for places, piece in zip(segments, self.pieces, strict=True)
        ]
        halves = {
            f"{piece.index}-{half}": Coder(wire.factors, message[0])
            for rows, piece in zip(self._rows, self.pieces, strict=True)
            for half, message in enumerate(rows.first_messages(piece.values))
        }
        super().__init__(values, halves, max(map(len, halves.values())))
        self._peers = range(num_workers)
        self._directions: dict[tuple[int, int], torch.Tensor] = {}
        self._between: dict[tuple[int, Meeting], tuple[torch.Tensor, torch.Tensor]] = {}

    def encode(self, transfer: Transfer) -> torch.Tensor:
        """First X·q, then Xᵀ·p with the p that both ends found."""
        k, original = transfer.piece.index, transfer.original
        if transfer.phase == 0:
            half = self._rows[k].first_half(original, self._direction(k, transfer.meeting.peer))
        else:
            _, p = self._between[k, transfer.meeting]
            half = self._rows[k].second_half(original, p)
        return self._write(transfer, 2 * k + transfer.phase, half[0])

    def apply(self, transfer: Transfer) -> None:
        k, x, meeting = transfer.piece.index, transfer.piece.values, transfer.meeting
        rows, sent, coder = self._rows[k], transfer.sent, self._coders[2 * k + transfer.phase]
        assert sent is not None
        found = coder.difference(sent, transfer.arrived).view(1, -1)
        if transfer.phase == 0:
            self._between[k, meeting] = found, rows.sides(found)
            return
        first, p = self._between.pop((k, meeting))
        s = rows.right.gather(found) if rows.matrices else None
        if s is not None:
            direction = self._direction(k, meeting.peer)
            direction.copy_(renew_directions(direction, s))
        rows.move(x, first, p, s, x.new_full((1,), transfer.signed_weight))

    def state(self) -> Mapping[str, torch.Tensor]:
        ks = [k for k, rows in enumerate(self._rows) if rows.matrices]
        directions = {f"directions-{k}-{p}": self._direction(k, p) for p in self._peers for k in ks}
        return {**super().state(), **directions}

    def forget(self, peer: int) -> None:
        """The link's directions begin as at first."""
        for k, rows in enumerate(self._rows):
            if rows.matrices:
                self._direction(k, peer).copy_(rows.start.unsqueeze(0))

    def _direction(self, k: int, peer: int) -> torch.Tensor:
        if (k, peer) not in self._directions:
            self._directions[k, peer] = self._rows[k].start.unsqueeze(0).clone()
        return self._directions[k, peer]


def is_finite(values: torch.Tensor) -> bool:
    """Whether no value is infinite or NaN, in one pass over memory.

    >>> is_finite(torch.ones(3)), is_finite(torch.tensor([1.0, torch.inf]))
    (True, False)
    """
    if not (values.is_floating_point() or values.is_complex()):
        return True
    total = values.sum(dtype=torch.float32 if values.dtype == torch.float16 else None)
    # A sum may overflow where its values do not.
    return bool(torch.isfinite(total)) or bool(torch.isfinite(values).all())


class TopKAverage:
    """The average of the largest movements, with error feedback: what a top-k wire sends to all."""

    def __init__(
        self, values: Sequence[torch.Tensor], segments: Sequence[Sequence[Segment]], wire: TopK
    ) -> None:
        self._wire = wire
        rows = [value.view(1, -1) for value in values]
        pairs = zip(segments, rows, strict=True)
        self._rows = [(row, TopKRows(wire, places, row)) for places, row in pairs]

    def take(self, transport: Transport, timeout: float) -> int:
        """Replace the values by the average; how many bytes this worker sent."""
        messages = [pack_chosen(chosen) for row, f in self._rows for chosen in f.send(row)]
        own = torch.cat(messages)
        arrived = ring_gather(transport, own.to(transport.device or own.device), timeout)
        for each in arrived:
            split = iter(torch.split(each.to(own.device), [len(m) for m in messages]))
            for part in (part for row, feedback in self._rows for part in feedback.parts(row)):
                chosen = unpack_chosen(next(split), part.shape[1], self._wire)
                part.add_(spread(chosen, part.shape[1], part.dtype), alpha=1 / len(arrived))
        for row, feedback in self._rows:
            feedback.settle(row)
        return (len(arrived) - 1) * len(own)

    def state(self) -> Mapping[str, torch.Tensor]:
        """Where the last average left the worker, and what was not sent since."""
        return {
            f"{name}-{k}": tensor
            for k, (_, feedback) in enumerate(self._rows)
            for name, tensor in (("anchor", feedback.anchor), ("error", feedback.error))
        }


class RelayedSums:
    """One worker's part of RelaySum, with its neighbours in a tree; see `matcha.rounds.Relay`.

    Values are averaged in place; those in `any_value` may hold what is not finite.
    """

    def __init__(
        self,
        transport: Transport,
        values: Sequence[torch.Tensor],
        neighbors: Collection[int],
        any_value: Collection[int] = (),
    ) -> None:
        self._transport, self._values = transport, list(values)
        self._any_value = frozenset(any_value)
        # What a sum is over is counted by a sum itself.
        self._parts = [*values, torch.ones(1, dtype=torch.float64)]
        self._sums = {j: [torch.zeros_like(p) for p in self._parts] for j in sorted(neighbors)}

    def state(self) -> Mapping[str, torch.Tensor]:
        """The sums that neighbors sent last."""
        return {f"{j}.{k}": part for j, sums in self._sums.items() for k, part in enumerate(sums)}

    def reset(self) -> None:
        """Start again: nothing has come yet."""
        for tensor in self.state().values():
            tensor.zero_()

    def mix(self, timeout: float) -> int:
        """Send and take sums, and average; how many bytes this worker sent.

        Raises:
            PeerLostError: a neighbour is gone, late, or sent a sum that is not finite.
        """
        m, sent = self._transport.num_workers, 0
        for k in reversed(range(len(self._parts))):  # counts first: means need them
            part = self._parts[k]
            before = {j: sums[k] for j, sums in self._sums.items()}
            device = self._transport.device or part.device
            arriving = {j: torch.empty_like(part, device=device) for j in before}
            messages = []
            for j, incoming in arriving.items():
                out = part.clone()
                for other in (before[i] for i in before if i != j):
                    out.add_(other)
                sent += out.nbytes
                out = out.to(device)
                messages.append(Message(peer=j, tag=Tag.RELAY, incoming=incoming, outgoing=out))
            self._transport.post(messages).wait(timeout)
            for j, into in before.items():
                if k not in self._any_value and not is_finite(arriving[j]):
                    raise self._transport.refuse(j, "sent a sum that is not finite")
                into.copy_(arriving[j])
            if k < len(self._values):
                part.mul_(m - float(sum(sums[-1] for sums in self._sums.values())))
                for into in before.values():
                    part.add_(into)
                part.div_(m)
        return sent


# -- parts -----------------------------------------------------------------------------------------


def _blocks(
    values: Sequence[torch.Tensor], segments: Sequence[Sequence[Segment]], limit: int
) -> Iterator[Piece]:
    """Pieces of at most `limit` blocks."""
    index = 0
    for k, (value, places) in enumerate(zip(values, segments, strict=True)):
        is_padding = torch.ones(len(value), dtype=torch.bool)
        for place in places:
            is_padding[place.offset : place.offset + place.size] = False
        blocks = value.view(-1, BLOCK)
        for start in range(0, len(blocks), limit):
            part = blocks[start : start + limit]
            inside = is_padding[start * BLOCK :][: part.numel()].nonzero().flatten()
            padding = inside.to(value.device) if len(inside) else None
            yield Piece(index, part, k, start, padding)
            index += 1


# -- arithmetic: the operations of Round.mix, in its order, without fused multiply-adds ------------


def _chunks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    if tensors[0].device.type == "cpu" and tensors[0].numel() > _CHUNK:
        return zip(*(torch.split(tensor, _CHUNK) for tensor in tensors), strict=True)
    return iter([tensors])


def _average(x: torch.Tensor, arrived: torch.Tensor, weight: float) -> None:
    """Set x <- (1 - w) x + w arrived; `arrived` is used up."""
    if weight == 0.5:  # halving is exact, so it may come last: two passes, not three
        for mine, theirs in _chunks(x, arrived):
            mine.add_(theirs).mul_(0.5)
        return
    own = float(1 - torch.tensor(weight, dtype=x.dtype))  # rounded once, as the definition does
    for mine, theirs in _chunks(x, arrived):
        mine.mul_(own).add_(theirs.mul_(weight))


def _move(x: torch.Tensor, arrived: torch.Tensor, sent: torch.Tensor, weight: float) -> None:
    """Set x <- x + w (arrived - sent), in x's dtype; `arrived` is used up."""
    for values, theirs, mine in _chunks(x, arrived, sent):
        kind = values.device, values.dtype
        values.add_(theirs.to(*kind).sub_(mine.to(*kind)).mul_(weight))
