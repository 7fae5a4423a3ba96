"""The exchange over a low-rank wire: two small messages a meeting, one a factor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from matcha.distributed.exchange.exchange import Meeting
from matcha.distributed.exchange.greetings import Courtesy
from matcha.distributed.exchange.modulo import refuse_nonfinite
from matcha.distributed.transports.base import Transport
from matcha.rounds import Round
from matcha.wires import LowRank
from matcha.wires.coding import Coder
from matcha.wires.lowrank import LowRankRows, renewed
from matcha.wires.segments import Segment

__all__ = ["LowRankExchange"]


@dataclass(slots=True)
class _Move:
    """What a meeting found for one flat tensor: both ends know it."""

    first: torch.Tensor
    p: torch.Tensor
    s: torch.Tensor | None


class LowRankExchange(Courtesy):
    """Mixes flat tensors with the partners of a round over a low-rank wire, in place.

    The arguments are those of `ModuloExchange`.
    """

    def __init__(
        self,
        transport: Transport,
        values: Sequence[torch.Tensor],
        segments: Sequence[Sequence[Segment]],
        wire: LowRank,
        *,
        timeout: float,
    ) -> None:
        super().__init__(transport, timeout)
        self._values = [value.view(1, -1) for value in values]
        self._rows = [
            LowRankRows(wire, places, value)
            for places, value in zip(segments, self._values, strict=True)
        ]
        self._coders = [
            [Coder(wire.factors, half[0]) for half in rows.first_messages(value)]
            for rows, value in zip(self._rows, self._values, strict=True)
        ]
        self._directions: dict[tuple[int, int], torch.Tensor] = {}
        self._iteration: int | None = None
        self._scales = torch.empty(0, dtype=torch.uint8)

    def run(self, round: Round, met: Sequence[Meeting], iteration: int) -> None:
        """Carry out this worker's part of a round; see `ModuloExchange.run`."""
        self.transport.doing = f"the round of iteration {iteration}"
        refuse_nonfinite(self._values, self.transport, iteration)
        if iteration != self._iteration:
            self.settle()
            self._iteration = iteration
            coders = [coder for pair in self._coders for coder in pair]
            self._scales = torch.cat([coder.begin().cpu() for coder in coders])
        found = []
        for meeting in met:
            moves = self._meet(meeting, iteration)
            if round.mixing == "pairwise":
                self._apply(meeting, moves)
            else:  # every partner gets the values before the round
                found.append((meeting, moves))
        for meeting, moves in found:
            self._apply(meeting, moves)

    def settle(self) -> None:
        """Let the last round's meetings tell their scales: called before the next, or a save."""
        if self._iteration is not None:
            for pair in self._coders:
                for coder in pair:
                    coder.end()
            self._iteration = None

    def state(self) -> Mapping[str, torch.Tensor]:
        """What later rounds depend on."""
        self.settle()
        named = {
            f"scales-{k}-{half}": coder.scales
            for k, pair in enumerate(self._coders)
            for half, coder in enumerate(pair)
        }
        for peer in range(self.transport.num_workers):
            for k in range(len(self._values)):
                if self._rows[k].matrices:
                    named[f"directions-{k}-{peer}"] = self._direction(k, peer)
        return named

    def forget(self, peer: int) -> None:
        """Let the directions of a link begin as at first: its two ends must have the same."""
        for k in range(len(self._values)):
            if self._rows[k].matrices:
                self._direction(k, peer).copy_(self._rows[k].start.unsqueeze(0))

    def _direction(self, k: int, peer: int) -> torch.Tensor:
        if (k, peer) not in self._directions:
            self._directions[k, peer] = self._rows[k].start.unsqueeze(0).clone()
        return self._directions[k, peer]

    def _meet(self, meeting: Meeting, iteration: int) -> list[_Move]:
        tag = 3 * meeting.position
        greeting = self.greet(meeting, tag, iteration, self._scales)
        sizes = [2 * len(coder) for pair in self._coders for coder in pair]
        scales = [part.clone() for part in torch.split(self.hear(greeting), sizes)]
        rows = list(zip(self._rows, self._values, strict=True))
        halves = [
            r.first_half(x, self._direction(k, meeting.peer)) for k, (r, x) in enumerate(rows)
        ]
        first = self._agree(meeting, 0, tag + 1, halves, scales)
        p = [r.sides(found) for (r, _), found in zip(rows, first, strict=True)]
        halves = [r.second_half(x, side) for (r, x), side in zip(rows, p, strict=True)]
        second = self._agree(meeting, 1, tag + 2, halves, scales)
        moves = []
        for k, (r, _) in enumerate(rows):
            s = r.right.gathered(second[k]) if r.matrices else None
            if s is not None:
                direction = self._direction(k, meeting.peer)
                direction.copy_(renewed(direction, s))
            moves.append(_Move(first[k], p[k], s))
        return moves

    def _agree(
        self,
        meeting: Meeting,
        half: int,
        tag: int,
        blocks: Sequence[torch.Tensor],
        scales: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """The difference of one half as both ends know it, a flat row for each tensor."""
        lower = self.is_lower(meeting)
        coders = [pair[half] for pair in self._coders]
        common = [coder.common(scales[2 * k + half]) for k, coder in enumerate(coders)]
        messages, coded = [], []
        for coder, rows, grid in zip(coders, blocks, common, strict=True):
            message = torch.empty(
                coder.message_bytes(len(coder)), dtype=torch.uint8, device=coder.device
            )
            coded.append(coder.encode(rows[0], 0, grid, message, lower=lower))
            messages.append(message.to(self.transport.device or coder.device))
        leaving = torch.cat(messages)
        arriving = torch.empty_like(leaving)
        self.post(meeting.peer, tag, leaving, arriving).wait(self.timeout)
        self.bytes_sent += len(leaving)
        self.spare_bytes = max(self.spare_bytes, 2 * len(leaving))
        found = []
        parts = torch.split(arriving, [len(message) for message in messages])
        for coder, mine, part, grid in zip(coders, coded, parts, common, strict=True):
            size = len(coder), coder.block
            whole = torch.empty(size, dtype=coder.dtype, device=coder.device)
            for here, difference in coder.decode(mine, part.clone(), 0, grid, lower=lower):
                whole[here] = difference
            found.append(whole.view(1, -1))
        return found

    def _apply(self, meeting: Meeting, moves: Sequence[_Move]) -> None:
        signed = meeting.weight if self.is_lower(meeting) else -meeting.weight
        for rows, value, move in zip(self._rows, self._values, moves, strict=True):
            by = torch.full((1,), signed, dtype=value.dtype, device=value.device)
            rows.move(value, move.first, move.p, move.s, by)
