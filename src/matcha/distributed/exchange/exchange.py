"""The exchange: carries out one worker's part of a round on its buckets.

The definition is `Round.mix`; this file does the same operations in the same order on one worker's
row, so that float64 results agree to the bit, while messages and arithmetic overlap.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from matcha.distributed.collectives import ring_mean_, window_mean_
from matcha.distributed.transports.base import Message, Pending, Transport, meeting_tag
from matcha.errors import ExchangeError
from matcha.rounds import EXACT, ONE_WAY, OneWayRole, Round

__all__ = ["RUNNING", "Exchange", "Meeting", "meetings"]

RUNNING = -1  # in place of the iteration at which a worker finished

_BLOCK = 1 << 17  # elements: three passes over a block stay in the cache, so memory is read once
_NUM_SPARES = 4  # of half a bucket each: two buckets beyond the model


@dataclass(frozen=True, slots=True)
class Meeting:
    """One partner of this worker in a round, at one position of the round's matchings."""

    position: int
    peer: int
    weight: float
    """The partner's share."""
    role: OneWayRole | None = None
    """Where messages go one way: whom this worker sends to, and hears from."""


def meetings(round: Round, worker: int) -> tuple[Meeting, ...]:
    """Whom a worker meets in a round, in order; empty when it rests."""
    if round.mixing in ONE_WAY:
        roles = enumerate(round.one_way_roles(worker))
        return tuple(Meeting(t, r.peer, r.taken, r) for t, r in roles if r is not None)
    found = []
    for t, matching in enumerate(round.matchings):
        for (i, j), weight in zip(matching, round.shares(t), strict=True):
            if worker in (i, j):
                found.append(Meeting(t, j if i == worker else i, weight))
    return tuple(found)


@dataclass(slots=True)
class _Piece:
    """A contiguous part of a bucket: what one message carries."""

    index: int
    values: torch.Tensor
    wire_dtype: torch.dtype


@dataclass(slots=True)
class _Header:
    """What the two ends of a meeting tell each other before their values."""

    pending: Pending
    theirs: torch.Tensor
    finished: bool
    """Whether this end said that it had finished: with overlap that may be some time ago."""


@dataclass(slots=True)
class _Flight:
    """A message each way on its way, for one piece and one meeting."""

    piece: _Piece
    meeting: Meeting
    header: _Header | None
    pending: Pending
    incoming: torch.Tensor
    outgoing: torch.Tensor
    first: bool
    last: bool


class Exchange:
    """Mixes flat tensors with the partners of a round, in place.

    Laplacian rounds send the values before the round to every partner and add up in the order of
    the matchings. Pairwise rounds take one matching after the other, each seeing the result of the
    one before; a piece moves on to the next matching while later pieces are still on the wire.

    No order of waiting can deadlock: all workers start and finish messages in one common order
    (matching, then piece, for pairwise rounds; piece, then matching, for Laplacian ones), so the
    earliest unfinished message always has both its ends waiting for nothing else.

    Args:
        transport: carries the messages.
        values: this worker's flat tensors; every worker has the same sizes and dtypes.
        bucket_bytes: messages are at most half of this, and spare memory at most twice this.
        wire_dtype: send floating-point values in this smaller format. What rounding takes away from
            a message stays in the sender's own values (it moves by weight times the difference of
            the two messages), so the average over workers is kept.
        timeout: seconds to wait for any one message.

    Attributes:
        wait_seconds: spent waiting for partners so far.
        bytes_sent: so far.
        finished_at: the iteration at which this worker's training ended, or `RUNNING`; partners
            hear it with every meeting.
        finished: partners that had finished, as this worker had, when they met last.
    """

    def __init__(
        self,
        transport: Transport,
        values: Sequence[torch.Tensor],
        *,
        bucket_bytes: int,
        wire_dtype: torch.dtype | None = None,
        timeout: float,
    ) -> None:
        self.transport = transport
        self.timeout = timeout
        self.wait_seconds = 0.0
        self.bytes_sent = 0
        self.finished_at = RUNNING
        self.finished: set[int] = set()
        self._pieces = tuple(_pieces(values, max(1, bucket_bytes // 2), wire_dtype))
        self._spares: dict[tuple[int, torch.device], torch.Tensor] = {}
        self._size = max(p.values.nbytes for p in self._pieces)

    @property
    def spare_bytes(self) -> int:
        """Memory held beyond the values themselves."""
        return sum(spare.nbytes for spare in self._spares.values())

    def state(self) -> Mapping[str, torch.Tensor]:
        """What later rounds depend on: nothing, with whole values."""
        return {}

    def forget(self, peer: int) -> None:
        """Drop what is remembered of a neighbour: nothing, with whole values."""

    def run(self, round: Round, met: Sequence[Meeting], iteration: int) -> None:
        """Carry out this worker's part of a round.

        Args:
            round: what is active.
            met: this worker's `meetings` in it, at least one.
            iteration: travels with the messages; a partner at another one is an error.

        Raises:
            ExchangeError: a partner is gone, late, or at another iteration. The values are then
                partly mixed and must not be used.
        """
        self.transport.doing = f"the round of iteration {iteration}"
        if round.mixing == "push":
            self._push(met, iteration)
            return
        if round.mixing in EXACT:
            values = [piece.values for piece in self._pieces]
            if round.mixing == "average":
                self.bytes_sent += ring_mean_(self.transport, values, self.timeout)
            else:
                to = [meeting.role.to for meeting in met if meeting.role]
                self.bytes_sent += window_mean_(self.transport, values, to, self.timeout)
            return
        pairwise = round.mixing == "pairwise"
        window = _NUM_SPARES if pairwise or len(met) == 1 else _NUM_SPARES // 2
        flights: deque[_Flight] = deque()
        order = _order(self._pieces, met, pairwise)
        for number, (piece, meeting) in enumerate(order):
            # A pairwise piece leaves for its next partner only with the last one's values mixed in.
            while len(flights) >= window or (pairwise and any(f.piece is piece for f in flights)):
                self._land(flights.popleft(), round, iteration)
            flights.append(self._launch(piece, meeting, met, iteration, number, pairwise))
        while flights:
            self._land(flights.popleft(), round, iteration)

    # -- messages that go one way -----------------------------------------------------------------

    def _push(self, met: Sequence[Meeting], iteration: int) -> None:
        """Send to one and hear from another, one matching after the other, piece by piece.

        A worker waits only for what was sent at the same matching and piece, and sends before it
        waits: the earliest unfinished message always has a sender that waits for nothing.
        """
        flights: deque[tuple[_Piece, OneWayRole, Pending, torch.Tensor, torch.Tensor]] = deque()
        number = 0
        for meeting in met:
            role = meeting.role
            assert role is not None
            self._meet_at(role, meeting, iteration)
            for piece in self._pieces:
                while len(flights) >= _NUM_SPARES or any(f[0] is piece for f in flights):
                    self._take_in(*flights.popleft())
                flights.append(self._send(piece, role, meeting, number))
                number += 1
        while flights:
            self._take_in(*flights.popleft())

    def _send(
        self, piece: _Piece, role: OneWayRole, meeting: Meeting, number: int
    ) -> tuple[_Piece, OneWayRole, Pending, torch.Tensor, torch.Tensor]:
        incoming = self._spare(number % _NUM_SPARES, piece, staged=True)
        outgoing = piece.values
        if self._is_staged(piece):
            outgoing = self._spare(_NUM_SPARES + number % _NUM_SPARES, piece, staged=True)
            outgoing.copy_(piece.values)
        tag = self._tag(meeting.position, piece.index)
        messages = []
        if role.source is not None:
            arriving = incoming.view(torch.uint8)
            messages.append(Message(peer=role.source, tag=tag, incoming=arriving))
        if role.to is not None:
            leaving = outgoing.view(torch.uint8)
            messages.append(Message(peer=role.to, tag=tag, outgoing=leaving))
            self.bytes_sent += outgoing.nbytes
        return piece, role, self.transport.post(messages), incoming, outgoing

    def _take_in(
        self,
        piece: _Piece,
        role: OneWayRole,
        pending: Pending,
        incoming: torch.Tensor,
        outgoing: torch.Tensor,
    ) -> None:
        pending.wait(self.timeout)
        x = piece.values
        # Both ends work out the share from the same message, so that what one gives the other gets.
        if role.to is not None:
            x.sub_(outgoing.to(x.device, x.dtype) * role.given)
        if role.source is not None:
            x.add_(incoming.to(x.device, x.dtype) * role.taken)

    def _meet_at(self, role: OneWayRole, meeting: Meeting, iteration: int) -> None:
        """Tell the receiver which iteration this is, and check that the sender is at it too."""
        device = self.transport.device or torch.device("cpu")
        tag = self._tag(meeting.position, len(self._pieces))
        arriving = torch.full((1,), iteration, dtype=torch.int64, device=device)
        messages = []
        if role.source is not None:
            messages.append(Message(peer=role.source, tag=tag, incoming=arriving))
        if role.to is not None:
            leaving = torch.full((1,), iteration, dtype=torch.int64, device=device)
            messages.append(Message(peer=role.to, tag=tag, outgoing=leaving))
        started = time.perf_counter()
        self.transport.post(messages).wait(self.timeout)
        self.wait_seconds += time.perf_counter() - started
        if role.source is not None:
            self._check_iteration(role.source, int(arriving), iteration)

    # -- one message ------------------------------------------------------------------------------

    def _launch(
        self,
        piece: _Piece,
        meeting: Meeting,
        met: Sequence[Meeting],
        iteration: int,
        number: int,
        pairwise: bool,
    ) -> _Flight:
        first = meeting == met[0]
        header = None
        if piece.index == 0:
            tag = self._tag(meeting.position, len(self._pieces))
            header = self._launch_header(meeting.peer, tag, iteration)
        multiple = len(met) > 1 and not pairwise
        slots = _NUM_SPARES // 2 if multiple else _NUM_SPARES
        incoming = self._spare(number % slots, piece, staged=True)
        outgoing = piece.values
        if self._is_staged(piece):
            # A Laplacian piece is staged once: every partner gets the values before the round.
            slot = _NUM_SPARES + (piece.index if multiple else number) % slots
            outgoing = self._spare(slot, piece, staged=True)
            if pairwise or first:
                outgoing.copy_(piece.values)
        message = Message(
            peer=meeting.peer,
            tag=self._tag(meeting.position, piece.index),
            incoming=incoming.view(torch.uint8),
            outgoing=outgoing.view(torch.uint8),
        )
        self.bytes_sent += outgoing.nbytes
        return _Flight(
            piece=piece,
            meeting=meeting,
            header=header,
            pending=self.transport.post([message]),
            incoming=incoming,
            outgoing=outgoing,
            first=first,
            last=meeting == met[-1],
        )

    def _tag(self, position: int, index: int) -> int:
        return meeting_tag(position * (len(self._pieces) + 1) + index)

    def _launch_header(self, peer: int, tag: int, iteration: int) -> _Header:
        # A small message of its own leaves buckets as they are and tells when the partner came.
        device = self.transport.device or torch.device("cpu")
        arriving = torch.empty(2, dtype=torch.int64, device=device)
        leaving = torch.tensor([iteration, self.finished_at], dtype=torch.int64, device=device)
        message = Message(peer=peer, tag=tag, incoming=arriving, outgoing=leaving)
        pending = self.transport.post([message])
        return _Header(pending, arriving, self.finished_at != RUNNING)

    def _land(self, flight: _Flight, round: Round, iteration: int) -> None:
        if flight.header is not None:
            # The header comes as soon as the partner is there: waiting ends and exchanging begins.
            started = time.perf_counter()
            flight.header.pending.wait(self.timeout)
            self.wait_seconds += time.perf_counter() - started
            self._check_header(flight, iteration)
        flight.pending.wait(self.timeout)
        piece = flight.piece
        x, arrived = piece.values, flight.incoming
        if piece.wire_dtype != x.dtype:
            _accumulate(x, x, arrived, flight.outgoing, flight.meeting.weight)
            return
        arrived = arrived.to(x.device)
        if round.mixing == "pairwise":
            _average(x, arrived, flight.meeting.weight)
        elif flight.first and flight.last:
            _accumulate(x, x, arrived, x, flight.meeting.weight)
        else:
            # Partners still to come need the values before the round, so the sum grows elsewhere.
            half = _NUM_SPARES // 2  # such rounds receive into the other half
            total = self._spare(half + piece.index % half, piece, staged=False)
            base, out = x if flight.first else total, x if flight.last else total
            _accumulate(out, base, arrived, x, flight.meeting.weight)

    def _check_header(self, flight: _Flight, iteration: int) -> None:
        assert flight.header is not None
        theirs, finished_at = flight.header.theirs.tolist()
        self._check_iteration(flight.meeting.peer, theirs, iteration)
        if flight.header.finished and finished_at != RUNNING:
            self.finished.add(flight.meeting.peer)

    def _check_iteration(self, peer: int, theirs: int, iteration: int) -> None:
        if theirs != iteration:
            me = self.transport.name(self.transport.rank)
            raise ExchangeError(
                f"{self.transport.name(peer)} is at iteration {theirs}, but {me} is at "
                f"{iteration}: the workers took different numbers of steps."
            )

    # -- spare memory -----------------------------------------------------------------------------

    def _is_staged(self, piece: _Piece) -> bool:
        device = self.transport.device
        elsewhere = device is not None and piece.values.device != device
        return elsewhere or piece.wire_dtype != piece.values.dtype

    def _spare(self, slot: int, piece: _Piece, *, staged: bool) -> torch.Tensor:
        """Spare memory for a piece: where messages live (`staged`), or beside its values."""
        device = piece.values.device
        dtype = piece.values.dtype
        if staged:
            device = self.transport.device or device
            dtype = piece.wire_dtype
        spare = self._spares.get((slot, device))
        if spare is None or spare.nbytes < piece.values.numel() * dtype.itemsize:
            size = self._size // piece.values.element_size() * dtype.itemsize
            # Pinned: the GPU copies to and from it without a detour.
            pinned = device.type == "cpu" and piece.values.device.type == "cuda"
            spare = torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned)
            self._spares[slot, device] = spare
        return spare[: piece.values.numel() * dtype.itemsize].view(dtype)


def _pieces(
    values: Iterable[torch.Tensor], limit: int, wire_dtype: torch.dtype | None
) -> Iterator[_Piece]:
    index = 0
    for tensor in values:
        smaller = (
            wire_dtype is not None
            and tensor.is_floating_point()
            and wire_dtype.itemsize < tensor.element_size()
        )
        dtype = wire_dtype if smaller and wire_dtype is not None else tensor.dtype
        for part in torch.split(tensor, max(1, limit // tensor.element_size())):
            yield _Piece(index, part, dtype)
            index += 1


def _order(
    pieces: Sequence[_Piece], met: Sequence[Meeting], pairwise: bool
) -> Iterator[tuple[_Piece, Meeting]]:
    if pairwise:
        return ((piece, meeting) for meeting in met for piece in pieces)
    return ((piece, meeting) for piece in pieces for meeting in met)


# -- arithmetic: the operations of Round.mix, in its order, without fused multiply-adds ------------


def _blocks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    if tensors[0].device.type == "cpu" and tensors[0].numel() > _BLOCK:
        return zip(*(torch.split(tensor, _BLOCK) for tensor in tensors), strict=True)
    return iter([tensors])


def _average(x: torch.Tensor, arrived: torch.Tensor, weight: float) -> None:
    """Set x <- (1 - w) x + w arrived; `arrived` is used up."""
    own = float(1 - torch.tensor(weight, dtype=x.dtype))  # rounded once, as the definition does
    for mine, theirs in _blocks(x, arrived):
        if weight == 0.5:  # halving is exact, so it may come last: two passes, not three
            mine.add_(theirs).mul_(0.5)
        else:
            mine.mul_(own).add_(theirs.mul_(weight))


def _accumulate(
    out: torch.Tensor,
    base: torch.Tensor,
    arrived: torch.Tensor,
    origin: torch.Tensor,
    weight: float,
) -> None:
    """Set out <- base + w (arrived - origin), in out's dtype; `arrived` is used up."""
    for result, start, theirs, mine in _blocks(out, base, arrived, origin):
        if theirs.dtype == result.dtype:
            difference = theirs.sub_(mine)
        else:
            difference = theirs.to(result.device, result.dtype)
            difference = difference.sub_(mine.to(result.device, result.dtype))
        torch.add(start, difference.mul_(weight), out=result)
