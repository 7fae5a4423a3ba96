"""Meetings: whom a worker meets in a round, and how the two ends of a meeting begin it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from matcha.distributed.transports.base import Message, Pending, Transport
from matcha.errors import ExchangeError, PeerLostError
from matcha.rounds import ONE_WAY, OneWayRole, Round

__all__ = ["RUNNING", "Handshake", "Meeting", "MeetingHook", "meetings"]

RUNNING = -1  # in place of the iteration at which a worker finished


@dataclass(frozen=True, slots=True)
class Meeting:
    """One partner of this worker in a round, at one position of the round's matchings."""

    position: int
    peer: int
    weight: float
    """The partner's share."""
    role: OneWayRole | None = None
    """Where messages go one way: whom this worker sends to, and receives from."""

    def messages(
        self, tag: int, incoming: torch.Tensor, outgoing: torch.Tensor
    ) -> Sequence[Message]:
        """What this worker posts to send one tensor and receive another."""
        if self.role is None:
            return [Message(peer=self.peer, tag=tag, incoming=incoming, outgoing=outgoing)]
        found = []
        if self.role.source is not None:
            found.append(Message(peer=self.role.source, tag=tag, incoming=incoming))
        if self.role.to is not None:
            found.append(Message(peer=self.role.to, tag=tag, outgoing=outgoing))
        return found

    @property
    def sends(self) -> bool:
        """Whether this worker sends at all."""
        return self.role is None or self.role.to is not None


def meetings(round: Round, worker: int) -> tuple[Meeting, ...]:
    """Whom a worker meets in a round, in order; empty when it rests."""
    if round.mixing in ONE_WAY:
        roles = enumerate(round.one_way_roles(worker))
        return tuple(Meeting(t, role.peer, role.taken, role) for t, role in roles if role)
    found = []
    for t, matching in enumerate(round.matchings):
        for (i, j), weight in zip(matching, round.shares(t), strict=True):
            if worker in (i, j):
                found.append(Meeting(t, j if i == worker else i, weight))
    return tuple(found)


class Handshake:
    """The message that opens a meeting: where in the plan its sender is, and what codecs must know.

    The position is a small message of its own: it leaves the values as they are, tells when the
    partner came, and is a sign of life that transports can watch for.

    Args:
        transport: carries it.
        meeting: which it opens.
        tag: of the message.
        iteration: at which this worker is.
        finished_at: the iteration at which it finished training, or `RUNNING`.
        content: bytes of the codecs, if any; both ends send equally many.

    Attributes:
        messages: to be posted.
        pending: what they were posted under.
        answer: the partner's content, once it has come.
        both_finished: whether both ends say that they have finished, once it has come.
    """

    def __init__(
        self,
        transport: Transport,
        meeting: Meeting,
        tag: int,
        iteration: int,
        finished_at: int,
        content: torch.Tensor | None,
    ) -> None:
        self._transport, self._meeting, self._iteration = transport, meeting, iteration
        self._has_finished = finished_at != RUNNING
        self.both_finished = False
        device = transport.device or torch.device("cpu")
        position = torch.tensor([iteration, finished_at], dtype=torch.int64, device=device)
        self._position = position.clone()  # stays so where nothing is received
        self.messages = [*meeting.messages(tag, self._position, position)]
        self.pending: Pending
        self.answer = content
        if content is not None:
            content = content.to(device)
            self.answer = torch.empty_like(content)
            self.messages += meeting.messages(tag, self.answer, content)

    def wait(self, timeout: float) -> None:
        """Wait until the partner has come.

        Raises:
            ExchangeError: the partner is gone, late, or at another iteration.
        """
        self.pending.wait(timeout)
        iteration, finished_at = self._position.tolist()
        if iteration != self._iteration:
            name, transport = self._transport.name, self._transport
            peer = self._meeting.peer
            raise ExchangeError(
                f"{name(peer)} is at iteration {iteration}, but {name(transport.rank)} is at "
                f"{self._iteration}: the workers took different numbers of steps."
            )
        self.both_finished = self._has_finished and finished_at != RUNNING


class MeetingHook:
    """What is done around each meeting; with hooks, meetings are held one after another."""

    def begin_round(self, iteration: int) -> None:
        """Prepare for a round in which this worker has meetings."""

    def before(self, meeting: Meeting, iteration: int) -> bool:
        """Prepare for a meeting; False leaves it out."""
        return True

    def after(self, meeting: Meeting) -> None:
        """Finish a meeting in which all values have come."""

    def undo(self, meeting: Meeting, error: PeerLostError) -> bool:
        """Take a meeting back whose partner was lost; False where this hook cannot."""
        return False

    def end_round(self, num_held: int) -> None:
        """Finish a round; `num_held` of its meetings took place."""
