"""Transport: how bytes reach another worker, behind one small abstract class.

Everything above this file (exchange, collectives, agreement) knows workers by rank and moves
contiguous tensors; everything below knows sockets, MPI or threads.
"""

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum, unique
from typing import Protocol, TypeAlias

import torch

from matcha.errors import ExchangeError

__all__ = [
    "MAX_TAG",
    "Buffer",
    "Council",
    "Message",
    "Pending",
    "Tag",
    "Transport",
    "meeting_tag",
]

MAX_TAG = 32_767
"""The largest tag that every MPI library must take (MPI standard, MPI_TAG_UB)."""
Buffer: TypeAlias = memoryview | bytes | bytearray


@unique
class Tag(IntEnum):
    """Tags of messages that belong to no piece of a meeting: one for each purpose."""

    BROADCAST = MAX_TAG - 15
    REDUCE = MAX_TAG - 14
    GATHER = MAX_TAG - 13
    RING = MAX_TAG - 12
    CONFIRM = MAX_TAG - 7
    """The last byte of an all-or-nothing meeting."""
    CLIP = MAX_TAG - 6
    """How far each end of a clipped meeting has moved."""
    RENDEZVOUS = MAX_TAG - 5
    """When two workers have time for an asynchronous meeting."""


def meeting_tag(number: int) -> int:
    """The tag of a meeting's message of some number, which may be large.

    Tags come again in very long rounds: messages of one tag arrive in order, and few are ever
    on their way.

    >>> meeting_tag(7), meeting_tag(40_000) <= MAX_TAG
    (7, True)
    """
    return number % min(Tag)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One tensor to or from a peer, or one each way.

    Both ends of a link post the same tag for the same message. A tensor is contiguous and must stay
    untouched until the `Pending` it was posted under has been waited for.
    """

    peer: int
    tag: int
    """From 0 to `MAX_TAG`; messages of one tag between two workers arrive in order."""
    incoming: torch.Tensor | None = None
    outgoing: torch.Tensor | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.tag <= MAX_TAG, self.tag


class Pending(ABC):
    """Messages on their way."""

    @abstractmethod
    def wait(self, timeout: float) -> None:
        """Block until every tensor of the post may be used again; waiting again does nothing.

        Args:
            timeout: seconds after which to give up.

        Raises:
            ExchangeError: a peer did not answer in time or is gone; it is named.
        """

    def has_come(self) -> bool:
        """Whether `wait` would return at once.

        Only of a few whole numbers that are waited for, and where `Transport.threads` says so.
        """
        raise NotImplementedError


class Council(Protocol):
    """Calls that all workers within reach make together, on a transport that finds its own way."""

    def call(
        self,
        contribute: Callable[[dict[int, memoryview]], Sequence[Buffer]],
        conclude: Callable[[dict[int, memoryview], int], Buffer],
        timeout: float,
    ) -> Buffer:
        """What the root of a tree concludes from everybody's contributions, on every worker.

        Args:
            contribute: this worker's part joined with those of its children in the tree.
            conclude: the result at the root, from its children's parts and the number of workers.
            timeout: seconds after which to give up.
        """


class Transport(ABC):
    """Point-to-point messages between the workers of one run.

    Attributes:
        rank: this worker's number.
        num_workers: how many there are.
        device: where the tensors of a message must live; None takes any device.
        hosts: host name of each worker, filled in by `matcha.distributed.agreement`.
        doing: the call that this worker is in, in words; for others to read if it takes long.
        period: how often a team has begun to train over this transport.
        failed: whether a peer has failed this worker.
        threads: whether several threads of this worker may post and wait at once.
        asynchronous: whether a thread holds meetings beside the script: what one of the two waits
            for then says nothing of what the other does.
        council: how all workers do something together where a worker reaches only its neighbours;
            None where any two workers can talk.
    """

    rank: int
    num_workers: int
    device: torch.device | None = torch.device("cpu")
    hosts: tuple[str, ...] = ()
    doing: str = ""
    period: int = 0
    failed: bool = False
    threads: bool = False
    asynchronous: bool = False
    council: Council | None = None

    @property
    def members(self) -> tuple[int, ...]:
        """The workers that are there now, as far as this one knows; sorted."""
        return tuple(range(self.num_workers))

    @abstractmethod
    def post(self, messages: Sequence[Message]) -> Pending:
        """Start messages and return at once; every receive is posted before any send."""

    def close(self) -> None:  # noqa: B027  (most transports hold nothing)
        """Give back connections; nothing may be posted afterwards."""

    def report_waiting_on(self, peer: int | None) -> None:  # noqa: B027
        """Note where all can read it, if there is such a place, whom we wait for, or nobody."""

    def waiting_on(self, rank: int) -> int | None:
        """Whom `rank` accused; None when nobody, or when there is no place to note it."""
        return None

    def set_note(self, what: str, value: str) -> None:  # noqa: B027
        """Note something else about this worker where all can read it, if there is such a place.

        Args:
            what: `away`, `finished/PERIOD` (at which iteration) or `in` (which call it waits).
            value: empty takes it back.
        """

    def get_note(self, rank: int, what: str) -> str:
        """What `rank` noted; empty when nothing, or when there is no place to note it."""
        return ""

    def probe(self, peer: int) -> None:  # noqa: B027
        """Raise the error for a peer that is gone, where waiting alone would not tell."""

    def host(self) -> str:
        """The name of the machine this worker runs on."""
        return socket.gethostname()

    def name(self, rank: int) -> str:
        """`rank 3 (host node07)`: how people find a worker."""
        return f"rank {rank} (host {self.hosts[rank]})" if self.hosts else f"rank {rank}"

    def failure(self, peer: int, problem: str, patience: float) -> ExchangeError:
        """The error for a peer that failed us, which names the first cause where it is known.

        A worker that waits for a dead one is itself silent to its other partners, and closes their
        connections when it gives up. So each worker notes whom it waited for, and the one at the
        end of the chain, who accused nobody, is the cause.

        Args:
            peer: whom this worker waited for.
            problem: what it did, as the end of a sentence.
            patience: seconds to give the peer to say whom it waited for itself.
        """
        self.failed = True
        finished = self.get_note(peer, f"finished/{self.period}")
        if finished:
            return ExchangeError(
                f"{self.name(peer)} finished at iteration {finished}, but {self.name(self.rank)} "
                f"still waits for it in {self.doing or 'a call of all workers'}: let every worker "
                "take as many steps, or train inside `with gossip.join():`."
            )
        self.report_waiting_on(peer)
        end = time.monotonic() + patience
        chain = [peer]
        while True:
            accused = self.waiting_on(chain[-1])
            if accused is not None and accused not in (*chain, self.rank):
                chain.append(accused)
            elif len(chain) > 1 or time.monotonic() > end:
                break
            else:
                time.sleep(min(0.05, patience))
        if len(chain) == 1:
            return ExchangeError(f"{self.name(peer)} {problem}.")
        waits = "".join(f"{self.name(rank)}, which waited for " for rank in chain[:-1])
        me, culprit = self.name(self.rank), self.name(chain[-1])
        return ExchangeError(f"{culprit} stopped answering: {me} waited for {waits}it.")
