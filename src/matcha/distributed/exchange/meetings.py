"""Meetings: what two workers do together, whole or not at all.

Data go both ways and then one byte, "I have all of it", both ways. An end that does not get that
byte leaves the meeting out: its values are what they were (W = I there), and the average is kept.
The last byte itself can be lost while its sender goes on: then one end has moved and the other has
not, the sum shifts once by at most w‖x_i − x_j‖, and that is counted.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Literal, Protocol, TypeAlias

import torch

from matcha.distributed.exchange.exchange import Meeting
from matcha.distributed.exchange.turns import Runner, copy_values, take_turns
from matcha.distributed.transports.base import Message, Pending, Tag
from matcha.errors import PeerLostError
from matcha.rounds import Round

__all__ = ["MeetingPlace", "Meetings", "Outcome"]

Outcome: TypeAlias = Literal["held", "left out", "uncertain"]

_log = logging.getLogger("matcha.links")


class MeetingPlace(Protocol):
    """A transport on which workers may be missing."""

    rank: int

    def post(self, messages: Sequence[Message]) -> Pending:
        """Start messages."""

    def begin(self, iteration: int) -> None:
        """Say, before its first meeting, that an iteration's round has begun here."""

    def meets(self, peer: int, iteration: int) -> bool:
        """Whether both ends will come to a meeting."""

    def connection(self, peer: int) -> object:
        """What leads to a neighbour now; another one after each break."""


class Meetings:
    """Carries out rounds one meeting at a time, with whoever is there.

    It costs a copy of the values (three for Laplacian rounds with several partners) and one byte's
    way there and back a meeting; pieces are still pipelined within a meeting.

    Attributes:
        held: meetings that took place.
        left_out: meetings that did not.
        uncertain: of those left out, the ones in which the other end may have moved.
        shift: the most by which those can have moved the sum over workers (a norm).
        on_meeting: called after each meeting with its iteration, what became of it, and its shift.
    """

    def __init__(
        self,
        exchange: Runner,
        place: MeetingPlace,
        values: Sequence[torch.Tensor],
        forget: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._exchange = exchange
        self._forget = forget
        self._connections: dict[int, object] = {}
        self._place = place
        self._values = list(values)
        self._before = [torch.empty_like(value) for value in values]
        self.held = 0
        self.left_out = 0
        self.uncertain = 0
        self.shift = 0.0
        self.on_meeting: Callable[[int, Meeting, Outcome, float], None] | None = None

    def run(self, round: Round, met: Sequence[Meeting], iteration: int) -> None:
        """As `Exchange.run`: this worker's part of a round, without those who are gone."""
        self._place.begin(iteration)
        take_turns(self._values, round, met, lambda meeting: self._hold(round, meeting, iteration))

    def _hold(self, round: Round, meeting: Meeting, iteration: int) -> bool:
        """One meeting; whether it took place."""
        outcome: Outcome = "left out"
        shift = self.shift
        if self._place.meets(meeting.peer, iteration):
            self._greet(meeting.peer)
            outcome = self._try(round, meeting, iteration)
        self.held += outcome == "held"
        self.left_out += outcome != "held"
        if self.on_meeting is not None:
            self.on_meeting(iteration, meeting, outcome, self.shift - shift)
        return outcome == "held"

    def _greet(self, peer: int) -> None:
        """What a wire remembers of a link must be the same at both ends: a new one has no past."""
        now = self._place.connection(peer)
        if self._connections.setdefault(peer, now) is not now:
            self._connections[peer] = now
            self._forget(peer)

    def _try(self, round: Round, meeting: Meeting, iteration: int) -> Outcome:
        copy_values(self._before, self._values)
        has_all = False
        try:
            self._exchange.run(round, (meeting,), iteration)
            has_all = True
            self._confirm(meeting)
        except PeerLostError as error:
            if has_all:
                self.uncertain += 1
                self.shift += _distance(self._values, self._before)
            copy_values(self._values, self._before)
            _log.info("worker %d: iteration %d: %s", self._place.rank, iteration, error)
            return "uncertain" if has_all else "left out"
        return "held"

    def _confirm(self, meeting: Meeting) -> None:
        # The other may be gone as soon as it has our byte: its own is asked for before ours leaves,
        # and it alone is waited for.
        peer, byte = meeting.peer, torch.uint8
        theirs = Message(peer=peer, tag=Tag.CONFIRM, incoming=torch.empty(1, dtype=byte))
        pending = self._place.post([theirs])
        self._place.post([Message(peer=peer, tag=Tag.CONFIRM, outgoing=torch.ones(1, dtype=byte))])
        pending.wait(self._exchange.timeout)


def _distance(xs: Sequence[torch.Tensor], ys: Sequence[torch.Tensor]) -> float:
    squares = (float((x - y).abs().double().square().sum()) for x, y in zip(xs, ys, strict=True))
    return math.sqrt(sum(squares))
