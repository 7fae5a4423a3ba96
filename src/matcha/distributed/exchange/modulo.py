"""The exchange over a modulo wire: scales first, then packed bits, piece by piece.

The tests' oracle is tests/wires/definition.py. While one piece is on the wire the next is
encoded, so that neither the link nor the processor waits for the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from matcha.distributed.exchange.exchange import Meeting
from matcha.distributed.exchange.greetings import Courtesy, Greeting
from matcha.distributed.transports.base import Pending, Transport
from matcha.errors import ModelError
from matcha.rounds import Round
from matcha.wires import Modulo
from matcha.wires.coding import Coded, Coder
from matcha.wires.segments import Segment
from matcha.wires.wire import BLOCK

__all__ = ["ModuloExchange", "refuse_nonfinite"]

_PIECE = 1 << 18  # values: a tenth of a second at 10 Mbit/s, and a few milliseconds of encoding
_WINDOW = 4  # pieces under way
_HELD = 32  # bytes a value of a piece, over two: messages and residues of four pieces, work, bases


@dataclass(slots=True)
class _Piece:
    """Some blocks of one flat tensor: what one message carries."""

    number: int
    coder: int
    start: int
    """Its first block."""
    blocks: torch.Tensor
    padding: list[torch.Tensor]
    """What is no parameter's, and stays zero."""
    base: torch.Tensor | None = None
    """The values before a Laplacian round, while partners still need them."""


@dataclass(frozen=True, slots=True)
class _Spare:
    """Memory for one message, kept for the next: a round asks for nothing large."""

    leaving: torch.Tensor
    arriving: torch.Tensor
    kept: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.leaving.nbytes + self.arriving.nbytes + self.kept.nbytes


@dataclass(slots=True)
class _Flight:
    """A message each way on its way, for one piece and one meeting."""

    piece: _Piece
    meeting: Meeting
    pending: Pending
    coded: Coded
    arriving: torch.Tensor
    common: torch.Tensor
    spare: _Spare


class ModuloExchange(Courtesy):
    """Mixes flat tensors with the partners of a round over a modulo wire, in place.

    Args:
        transport: carries the messages.
        values: this worker's flat tensors, whole blocks each; the same on every worker.
        segments: where the parameters lie in each of them.
        wire: how many bits.
        bucket_bytes: spare memory is at most twice this, or a few blocks.
        timeout: seconds to wait for any one message.
    """

    def __init__(
        self,
        transport: Transport,
        values: Sequence[torch.Tensor],
        segments: Sequence[Sequence[Segment]],
        wire: Modulo,
        *,
        bucket_bytes: int,
        timeout: float,
    ) -> None:
        super().__init__(transport, timeout)
        self._values = list(values)
        self._coders = [Coder(wire, value.view(-1, BLOCK)) for value in values]
        limit = max(1, min(_PIECE, bucket_bytes // _HELD) // BLOCK)
        self._pieces = list(_pieces(values, segments, limit))
        self._iteration: int | None = None
        self._scales = torch.empty(0, dtype=torch.uint8)
        self._spares: dict[torch.device, list[_Spare]] = {}

    def run(self, round: Round, met: Sequence[Meeting], iteration: int) -> None:
        """Carry out this worker's part of a round; see `Exchange.run`.

        May be called several times for a round, each with some of its meetings.

        Raises:
            ExchangeError: a partner is gone, late, or at another iteration.
            ModelError: a value is not finite; nothing was sent.
        """
        self.transport.doing = f"the round of iteration {iteration}"
        refuse_nonfinite(self._values, self.transport, iteration)
        if iteration != self._iteration:
            self.settle()
            self._iteration = iteration
            self._scales = torch.cat([coder.begin().cpu() for coder in self._coders])
        pairwise = round.mixing == "pairwise"
        last = len(self._pieces)
        greetings = [
            self.greet(meeting, self._tag(meeting, last), iteration, self._scales)
            for meeting in met
        ]
        common: dict[int, list[torch.Tensor]] = {}
        flights: deque[_Flight] = deque()
        for piece, number in _order(self._pieces, len(met), pairwise):
            # A pairwise piece leaves for its next partner only with the last one's values mixed in.
            while len(flights) >= _WINDOW or (pairwise and any(f.piece is piece for f in flights)):
                self._land(flights.popleft())
            if number not in common:
                common[number] = self._common(greetings[number])
            is_last = number == len(met) - 1
            several = not pairwise and len(met) > 1
            scales = common[number][piece.coder]
            flights.append(self._launch(piece, met[number], scales, several, is_last))
            self._count(flights)
        while flights:
            self._land(flights.popleft())

    def settle(self) -> None:
        """Let the last round's meetings tell their scales: called before the next, or a save."""
        if self._iteration is not None:
            for coder in self._coders:
                coder.end()
            self._iteration = None

    def state(self) -> Mapping[str, torch.Tensor]:
        """What later rounds depend on."""
        self.settle()
        return {f"scales-{k}": coder.scales for k, coder in enumerate(self._coders)}

    # -- one message ------------------------------------------------------------------------------

    def _tag(self, meeting: Meeting, number: int) -> int:
        return meeting.position * (len(self._pieces) + 1) + number

    def _common(self, greeting: Greeting) -> list[torch.Tensor]:
        """A link's scales for each of the coders."""
        parts = torch.split(self.hear(greeting), [2 * len(coder) for coder in self._coders])
        # Copied: what follows an odd number of bytes cannot be seen as numbers of two.
        return [c.common(part.clone()) for c, part in zip(self._coders, parts, strict=True)]

    def _launch(
        self,
        piece: _Piece,
        meeting: Meeting,
        common: torch.Tensor,
        several: bool,
        is_last: bool,
    ) -> _Flight:
        coder = self._coders[piece.coder]
        if several and piece.base is None:
            piece.base = piece.blocks.clone()
        values = piece.blocks if piece.base is None else piece.base
        if is_last:
            piece.base = None
        size = coder.message_bytes(len(piece.blocks))
        spare = self._spare(coder)
        lower = self.is_lower(meeting)
        leaving = spare.leaving[:size]
        coded = coder.encode(values, piece.start, common, leaving, lower=lower, kept=spare.kept)
        leaving = leaving.to(self.transport.device or coder.device)
        arriving = spare.arriving[:size].to(leaving.device)
        pending = self.post(meeting.peer, self._tag(meeting, piece.number), leaving, arriving)
        self.bytes_sent += size
        return _Flight(
            piece=piece,
            meeting=meeting,
            pending=pending,
            coded=coded,
            arriving=arriving,
            common=common,
            spare=spare,
        )

    def _spare(self, coder: Coder) -> _Spare:
        """Memory that no flight uses."""
        spares = self._spares.setdefault(coder.device, [])
        if spares:
            return spares.pop()
        limit = max(len(piece.blocks) for piece in self._pieces)
        sizes = coder.message_bytes(limit), coder.message_bytes(limit), limit * BLOCK
        made = [torch.empty(size, dtype=torch.uint8, device=coder.device) for size in sizes]
        return _Spare(*made)

    def _land(self, flight: _Flight) -> None:
        flight.pending.wait(self.timeout)
        piece = flight.piece
        lower = self.is_lower(flight.meeting)
        weight = flight.meeting.weight if lower else -flight.meeting.weight
        coder = self._coders[piece.coder]
        for part, difference in coder.decode(
            flight.coded, flight.arriving, piece.start, flight.common, lower=lower
        ):
            piece.blocks[part].add_(difference, alpha=weight)
        for gap in piece.padding:
            gap.zero_()
        self._spares[coder.device].append(flight.spare)

    def _count(self, flights: deque[_Flight]) -> None:
        bases = sum(p.base.nbytes for p in self._pieces if p.base is not None)
        held = sum(flight.spare.nbytes for flight in flights) + bases
        work = sum(coder.spare_bytes for coder in self._coders)
        self.spare_bytes = max(self.spare_bytes, held + work)


def refuse_nonfinite(values: Sequence[torch.Tensor], transport: Transport, iteration: int) -> None:
    """A NaN or infinity has no place on a grid, and a partner must not get one by stealth.

    Raises:
        ModelError: a value is not finite.
    """
    for value in values:
        if not bool(torch.isfinite(value.sum())):
            raise ModelError(
                f"{transport.name(transport.rank)} holds a parameter that is not finite at "
                f"iteration {iteration}: training diverged; a lower learning rate may help."
            )


def _pieces(
    values: Sequence[torch.Tensor], segments: Sequence[Sequence[Segment]], limit: int
) -> Iterator[_Piece]:
    number = 0
    for k, (value, places) in enumerate(zip(values, segments, strict=True)):
        blocks = value.view(-1, BLOCK)
        for start in range(0, len(blocks), limit):
            part = blocks[start : start + limit]
            first, last = start * BLOCK, (start + len(part)) * BLOCK
            padding = [
                value[max(a, first) : min(b, last)]
                for a, b in _gaps(places, len(value))
                if a < last and b > first
            ]
            yield _Piece(number, k, start, part, padding)
            number += 1


def _gaps(places: Sequence[Segment], size: int) -> Iterator[tuple[int, int]]:
    """Stretches of a flat tensor that belong to no parameter."""
    end = 0
    for place in sorted(places, key=lambda place: place.offset):
        if place.offset > end:
            yield end, place.offset
        end = max(end, place.offset + place.size)
    if end < size:
        yield end, size


def _order(pieces: Sequence[_Piece], count: int, pairwise: bool) -> Iterator[tuple[_Piece, int]]:
    """Pieces and meetings in the order that all workers keep, so that none waits in a circle."""
    if pairwise:
        return ((piece, number) for number in range(count) for piece in pieces)
    return ((piece, number) for piece in pieces for number in range(count))
