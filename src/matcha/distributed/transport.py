"""Transport: how bytes reach another worker, behind one small abstract class.

Everything above this file (exchange, collectives, agreement) knows workers by rank and moves
contiguous tensors; everything below knows sockets, MPI or threads.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from matcha.errors import ExchangeError

__all__ = ["Message", "Pending", "Transport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One tensor to or from a peer, or one each way.

    Both ends of a link post the same tag for the same message. A tensor is contiguous and must stay
    untouched until the `Pending` it was posted under has been waited for.
    """

    peer: int
    tag: int
    incoming: torch.Tensor | None = None
    outgoing: torch.Tensor | None = None


class Pending(ABC):
    """Messages on their way."""

    @abstractmethod
    def wait(self, timeout: float) -> None:
        """Block until every tensor of the post may be used again.

        Args:
            timeout: seconds after which to give up.

        Raises:
            ExchangeError: a peer did not answer in time or is gone; it is named.
        """


class Transport(ABC):
    """Point-to-point messages between the workers of one run.

    Attributes:
        rank: this worker's number.
        num_workers: how many there are.
        device: where the tensors of a message must live; None takes any device.
        hosts: host name of each worker, filled in by `matcha.distributed.agreement`.
    """

    rank: int
    num_workers: int
    device: torch.device | None = torch.device("cpu")
    hosts: tuple[str, ...] = ()

    @abstractmethod
    def post(self, messages: Sequence[Message]) -> Pending:
        """Start messages and return at once; every receive is posted before any send."""

    def close(self) -> None:  # noqa: B027  (most transports hold nothing)
        """Give back connections; nothing may be posted afterwards."""

    def report(self, failure: str) -> None:  # noqa: B027
        """Tell the other workers, where there is a way to, what failed; the first report stays."""

    def reported(self) -> str | None:
        """The first failure any worker reported, as a sentence; None when there is none."""
        return None

    def host(self) -> str:
        """The name of the machine this worker runs on."""
        return socket.gethostname()

    def name(self, rank: int) -> str:
        """`rank 3 (host node07)`: how people find a worker."""
        return f"rank {rank} (host {self.hosts[rank]})" if self.hosts else f"rank {rank}"

    def failure(self, peer: int, problem: str) -> ExchangeError:
        """The error for a peer that failed us, which names the first cause where it is known.

        A worker that gives up closes its connections, so its neighbours fail next, then theirs.
        Each reports the cause before it closes anything; whoever fails later reads that first.
        """
        mine = f"{self.name(peer)} {problem}"
        self.report(mine)
        cause = self.reported()
        if cause is None or cause == mine:
            return ExchangeError(f"{mine}.")
        return ExchangeError(f"{cause}; so {self.name(self.rank)} had to stop too.")
