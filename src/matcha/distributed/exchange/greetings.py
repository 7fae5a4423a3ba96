"""Greetings: the small message that opens a meeting, and says where in the plan its sender is."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from matcha.distributed.exchange.exchange import RUNNING, Meeting
from matcha.distributed.transports.base import Message, Pending, Transport, meeting_tag
from matcha.errors import ExchangeError

__all__ = ["Courtesy", "Greeting"]


@dataclass(slots=True)
class Greeting:
    """A greeting each way, on its way."""

    peer: int
    iteration: int
    pending: Pending
    place: torch.Tensor
    """The iteration at which the other is, and the one at which it finished."""
    beside: torch.Tensor
    finished: bool
    """Whether this end said that it had finished."""


class Courtesy:
    """What every coded exchange does around its messages: greet, wait, count.

    Attributes:
        timeout: seconds to wait for any one message.
        wait_seconds: spent waiting for partners so far.
        bytes_sent: so far.
        spare_bytes: the most memory held beyond values and scales so far.
        finished_at: the iteration at which this worker's training ended, or `RUNNING`.
        finished: partners that had finished, as this worker had, when they met last.
    """

    def __init__(self, transport: Transport, timeout: float) -> None:
        self.transport, self.timeout = transport, timeout
        self.wait_seconds, self.bytes_sent, self.spare_bytes = 0.0, 0, 0
        self.finished_at = RUNNING
        self.finished: set[int] = set()

    def state(self) -> Mapping[str, torch.Tensor]:
        """What later rounds depend on."""
        return {}

    def forget(self, peer: int) -> None:
        """Drop what is remembered of a neighbour."""

    def greet(self, meeting: Meeting, tag: int, iteration: int, beside: torch.Tensor) -> Greeting:
        """Start a greeting that carries some bytes; both ends' are equally many."""
        device = self.transport.device or torch.device("cpu")
        place = torch.tensor([iteration, self.finished_at], dtype=torch.int64, device=device)
        leaving = [place, beside.to(device)] if len(beside) else [place]
        # Two messages: the numbers by themselves are a sign that transports can watch for.
        arriving = [torch.empty_like(part) for part in leaving]
        messages = [
            Message(peer=meeting.peer, tag=meeting_tag(tag), incoming=incoming, outgoing=outgoing)
            for incoming, outgoing in zip(arriving, leaving, strict=True)
        ]
        self.bytes_sent += len(beside)
        pending = self.transport.post(messages)
        said = self.finished_at != RUNNING
        place, beside = (*arriving, beside)[:2]
        return Greeting(meeting.peer, iteration, pending, place, beside, said)

    def hear(self, greeting: Greeting) -> torch.Tensor:
        """What the partner sent beside its place in the plan.

        Raises:
            ExchangeError: the partner is gone, late, or at another iteration.
        """
        started = time.perf_counter()
        greeting.pending.wait(self.timeout)
        self.wait_seconds += time.perf_counter() - started
        theirs, finished_at = greeting.place.tolist()
        if theirs != greeting.iteration:
            me, peer = self.transport.name(self.transport.rank), self.transport.name(greeting.peer)
            raise ExchangeError(
                f"{peer} is at iteration {theirs}, but {me} is at {greeting.iteration}: the "
                "workers took different numbers of steps."
            )
        if greeting.finished and finished_at != RUNNING:
            self.finished.add(greeting.peer)
        return greeting.beside

    def post(self, peer: int, tag: int, leaving: torch.Tensor, arriving: torch.Tensor) -> Pending:
        """Start a message each way."""
        message = Message(peer=peer, tag=meeting_tag(tag), incoming=arriving, outgoing=leaving)
        return self.transport.post([message])

    def is_lower(self, meeting: Meeting) -> bool:
        """Whether this worker is the lower end of the link."""
        return self.transport.rank < meeting.peer
