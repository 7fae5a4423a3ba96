"""Greetings: the small message that opens a meeting, and says where in the plan its sender is."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from matcha.distributed.transports.transport import Message, Pending, Transport
from matcha.errors import ExchangeError

__all__ = ["Greeting", "greet"]

_SIZE = 8  # bytes of an iteration's number


@dataclass(slots=True)
class Greeting:
    """A greeting each way, on its way."""

    transport: Transport
    peer: int
    iteration: int
    pending: Pending
    arriving: torch.Tensor

    def receive(self, timeout: float) -> torch.Tensor:
        """What the partner sent beside its iteration.

        Raises:
            ExchangeError: the partner is gone, late, or at another iteration.
        """
        self.pending.wait(timeout)
        theirs = int(self.arriving[:_SIZE].view(torch.int64))
        if theirs != self.iteration:
            me, peer = self.transport.name(self.transport.rank), self.transport.name(self.peer)
            raise ExchangeError(
                f"{peer} is at iteration {theirs}, but {me} is at {self.iteration}: the workers "
                "took different numbers of steps."
            )
        return self.arriving[_SIZE:]

    def wait(self, timeout: float) -> float:
        """Wait for the partner; the seconds that took."""
        started = time.perf_counter()
        self.pending.wait(timeout)
        return time.perf_counter() - started


def greet(
    transport: Transport, peer: int, tag: int, iteration: int, beside: torch.Tensor
) -> Greeting:
    """Start a greeting that carries some bytes; both ends' are equally many."""
    device = transport.device or torch.device("cpu")
    number = torch.tensor([iteration], dtype=torch.int64).view(torch.uint8)
    leaving = torch.cat([number.to(device), beside.to(device)])
    arriving = torch.empty_like(leaving)
    message = Message(peer=peer, tag=tag, incoming=arriving, outgoing=leaving)
    return Greeting(transport, peer, iteration, transport.post([message]), arriving)
