"""Elastic meetings: all or nothing, held with the workers that are there.

Values go both ways and then one byte, "I have all of it", both ways. An end that does not get that
byte leaves the meeting out: its values are what they were (W = I there), and the average is kept.
The last byte itself can be lost while its sender goes on: then one end has moved and the other has
not, the sum shifts once by at most w‖x_i − x_j‖, and that is counted.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import torch

from matcha.distributed.exchange.exchange import Exchange
from matcha.distributed.exchange.meeting import Meeting, MeetingHook
from matcha.distributed.links.transport import LinkTransport
from matcha.distributed.transports.base import Message, Tag
from matcha.errors import PeerLostError

__all__ = ["ElasticMeetings", "Outcome"]

Outcome: TypeAlias = Literal["held", "left out", "uncertain"]

_log = logging.getLogger("matcha.links")


class ElasticMeetings(MeetingHook):
    """Leaves out meetings with workers that are missing, and takes back those that break off.

    It costs a copy of the values and one byte's round trip per meeting; pieces are still pipelined
    within a meeting.

    Attributes:
        held: meetings that took place.
        left_out: meetings that did not.
        uncertain: of those left out, the ones in which the other end may have moved.
        shift: the most by which those can have moved the sum over workers (a norm).
        on_meeting: called after each meeting with its iteration, what became of it, and its shift.
    """

    def __init__(
        self, exchange: Exchange, team: LinkTransport, values: Sequence[torch.Tensor]
    ) -> None:
        self._exchange, self._team, self._values = exchange, team, list(values)
        self._before = [torch.empty_like(value) for value in values]
        self._connections: dict[int, object] = {}
        self._iteration = 0
        self._is_under_way = self._has_all = False
        self.held = 0
        self.left_out = 0
        self.uncertain = 0
        self.shift = 0.0
        self.on_meeting: Callable[[int, Meeting, Outcome, float], None] | None = None

    def begin_round(self, iteration: int) -> None:
        """As `MeetingHook.begin_round`."""
        self._team.begin(iteration)

    def before(self, meeting: Meeting, iteration: int) -> bool:
        """As `MeetingHook.before`: False where the partner will not come."""
        self._iteration = iteration
        self._is_under_way = self._has_all = False
        if not self._team.meets(meeting.peer, iteration):
            self._count(meeting, "left out")
            return False
        # What a wire remembers of a link must be the same at both ends: a new one has no past.
        connection = self._team.connection(meeting.peer)
        if self._connections.setdefault(meeting.peer, connection) is not connection:
            self._connections[meeting.peer] = connection
            self._exchange.forget(meeting.peer)
        for before, value in zip(self._before, self._values, strict=True):
            before.copy_(value)
        self._is_under_way = True
        return True

    def after(self, meeting: Meeting) -> None:
        """As `MeetingHook.after`: confirm, and wait for the partner's confirmation."""
        self._has_all = True
        # The other may be gone as soon as it has our byte: its own is asked for before ours leaves,
        # and it alone is waited for.
        peer, byte = meeting.peer, torch.uint8
        theirs = Message(peer=peer, tag=Tag.CONFIRM, incoming=torch.empty(1, dtype=byte))
        ours = Message(peer=peer, tag=Tag.CONFIRM, outgoing=torch.ones(1, dtype=byte))
        pending = self._team.post([theirs])
        self._team.post([ours])
        pending.wait(self._exchange.timeout)
        self._count(meeting, "held")

    def undo(self, meeting: Meeting, error: PeerLostError) -> bool:
        """As `MeetingHook.undo`: the values are what they were before the meeting."""
        if not self._is_under_way:
            return False
        _log.info("worker %d: iteration %d: %s", self._team.rank, self._iteration, error)
        pairs = list(zip(self._values, self._before, strict=True))
        shift = 0.0
        if self._has_all:
            squares = (float((x - y).abs().double().square().sum()) for x, y in pairs)
            shift = math.sqrt(sum(squares))
        for value, before in pairs:
            value.copy_(before)
        self._count(meeting, "uncertain" if self._has_all else "left out", shift)
        return True

    def _count(self, meeting: Meeting, outcome: Outcome, shift: float = 0.0) -> None:
        self.held += outcome == "held"
        self.left_out += outcome != "held"
        self.uncertain += outcome == "uncertain"
        self.shift += shift
        if self.on_meeting is not None:
            self.on_meeting(self._iteration, meeting, outcome, shift)
