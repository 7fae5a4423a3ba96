"""Transport: how bytes reach another worker, behind one small abstract class.

Everything above this file (exchanges, collectives, agreement) knows workers by rank and moves
contiguous tensors; everything below knows sockets, MPI or threads.
"""

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum, unique
from itertools import takewhile
from typing import TypeAlias, TypeVar

import torch

from matcha.errors import ExchangeError

T = TypeVar("T")

MAX_TAG = 32_767
"""The largest tag that every MPI library accepts (MPI standard, MPI_TAG_UB)."""
Buffer: TypeAlias = memoryview | bytes | bytearray
Combine: TypeAlias = Callable[[dict[int, memoryview]], Sequence[Buffer]]
"""Joins this worker's part with those of its children in a tree, by rank."""
Conclude: TypeAlias = Callable[[dict[int, memoryview], int], Buffer]
"""At the root: the result, from its children's parts and the number of workers."""


@unique
class Tag(IntEnum):
    """Tags of messages that belong to no piece of a meeting: one for each purpose."""

    BROADCAST = MAX_TAG - 15
    REDUCE = MAX_TAG - 14
    RING = MAX_TAG - 12
    RELAY = MAX_TAG - 11
    CONFIRM = MAX_TAG - 7
    """The last byte of an all-or-nothing meeting."""
    CLIP = MAX_TAG - 6
    """How far each end of a clipped meeting has moved."""
    RENDEZVOUS = MAX_TAG - 5
    """When two workers have time for an asynchronous meeting."""


_NUM_MEETING_TAGS = min(Tag)


def meeting_tag(number: int) -> int:
    """The tag of a meeting's message with some number, which may be large.

    Tags repeat in very long rounds: messages with one tag arrive in order, and few are ever in
    flight.

    >>> meeting_tag(7), meeting_tag(40_000) <= MAX_TAG
    (7, True)
    """
    return number % _NUM_MEETING_TAGS


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One tensor to or from a peer, or one each way.

    Both ends of a link post the same tag for the same message. A tensor is contiguous and must stay
    untouched until `wait` of the `Pending` returns.
    """

    peer: int
    tag: int
    """A number from 0 to `MAX_TAG`; messages with one tag between two workers arrive in order."""
    incoming: torch.Tensor | None = None
    outgoing: torch.Tensor | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.tag <= MAX_TAG, self.tag


class Pending(ABC):
    """Messages in flight."""

    @abstractmethod
    def wait(self, timeout: float) -> None:
        """Block until every tensor of the post may be used again; a second call returns at once.

        Args:
            timeout: Seconds after which to give up.

        Raises:
            ExchangeError: A peer did not answer in time or is gone; the message names it.
        """

    def has_come(self) -> bool:
        """Whether `wait` would return at once.

        Only for a few integers that this worker waits for, and where `Transport.threads` is true.
        """
        raise NotImplementedError


class Transport(ABC):
    """Point-to-point messages between the workers of one run.

    Attributes:
        rank: This worker's number.
        num_workers: How many workers there are.
        device: Where the tensors of a message must live; None accepts any device.
        hosts: Host name of each worker, filled in by `matcha.distributed.transports.collectives`.
        doing: The call that this worker is in, in words; other workers read it if it takes long.
        period: How many times training has started over this transport.
        failed: Whether a peer has failed this worker.
        threads: Whether several threads of this worker may post and wait at once.
        asynchronous: Whether a thread holds meetings beside the script: then what one of the two
            waits for says nothing about the other.
        has_tree: Whether collective calls go through `tree_call`, because a worker reaches only
            its neighbours.
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
    has_tree: bool = False

    @property
    def members(self) -> tuple[int, ...]:
        """The workers that take part now, as far as this one knows; sorted."""
        return tuple(range(self.num_workers))

    @abstractmethod
    def post(self, messages: Sequence[Message]) -> Pending:
        """Start messages and return at once; every receive is posted before any send."""

    def tree_call(
        self, combine: Combine, conclude: Conclude, read: Callable[[Buffer], T], timeout: float
    ) -> T:
        """What the root of a spanning tree concludes from all workers' parts, on every worker.

        Args:
            combine: Makes the part that this worker sends to its parent.
            conclude: Makes the result at the root.
            read: Takes in the result; what it raises is a fault of the worker that sent it.
            timeout: Seconds after which to give up.
        """
        raise NotImplementedError

    def expect_model(self, num_bytes: int) -> None:  # noqa: B027
        """Say how large the model is: a peer's message that it cannot explain is a fault."""

    def close(self) -> None:  # noqa: B027  (most transports hold nothing)
        """Close connections; nothing may be posted afterwards."""

    def set_note(self, key: str, value: str) -> None:  # noqa: B027
        """Publish something about this worker, if this transport has a place for it.

        Args:
            key: `away`, `finished/PERIOD` (at which iteration), `in` (the call in which it waits)
                or `waiting_on` (the peer for which it waits).
            value: An empty value removes the note.
        """

    def get_note(self, rank: int, key: str) -> str:
        """What `rank` published; empty if nothing, or if this transport has no place for it."""
        return ""

    def report_waiting_on(self, peer: int | None) -> None:
        """Publish which peer this worker waits for, or that it waits for none."""
        self.set_note("waiting_on", "" if peer is None else str(peer))

    def waiting_on(self, rank: int) -> int | None:
        """The peer for which `rank` reported to wait; None if there is none."""
        noted = self.get_note(rank, "waiting_on")
        return int(noted) if noted.isdecimal() and int(noted) < self.num_workers else None

    def waiting_chain(self, peer: int) -> list[int]:
        """The peer, the one for which it waits, and so on, up to one that waits for none."""
        chain = [peer]
        while (following := self.waiting_on(chain[-1])) is not None and following not in chain:
            chain.append(following)
        return chain

    def refuse(self, peer: int, problem: str) -> ExchangeError:
        """The error for a peer whose message must not be used; nothing more is taken from it."""
        self.failed = True
        self.report_waiting_on(peer)
        return ExchangeError(f"{self.name(peer)} {problem}.")

    def probe(self, peer: int) -> None:  # noqa: B027
        """Raise the error for a peer that is gone, where waiting alone would not tell."""

    def host(self) -> str:
        """The name of the machine on which this worker runs."""
        return socket.gethostname()

    def name(self, rank: int) -> str:
        """`rank 3 (host node07)`: how people find a worker."""
        known = rank < len(self.hosts)  # a worker that joined has told no host
        return f"rank {rank} (host {self.hosts[rank]})" if known else f"rank {rank}"

    def failure(self, peer: int, problem: str, patience: float) -> ExchangeError:
        """The error for a peer that failed us, which names the first cause where it is known.

        A worker that waits for a dead one is itself silent to its other partners, and closes their
        connections when it gives up. So each worker publishes which peer it waited for, and the one
        at the end of the chain, which waited for none, is the cause.

        Args:
            peer: The peer for which this worker waited.
            problem: What the peer did, as the end of a sentence.
            patience: Seconds in which the peer may publish which peer it waited for itself.
        """
        self.failed = True
        finished, _, at_exit = self.get_note(peer, f"finished/{self.period}").partition(" ")
        if finished:
            name = self.name(peer)
            hint = "if it called sys.exit() because of an error, its log says which; otherwise "
            return ExchangeError(
                f"{f'the script of {name} ended' if at_exit else f'{name} finished'} at iteration "
                f"{finished}, but {self.name(self.rank)} still waits for it in "
                f"{self.doing or 'a collective call'}: {hint if at_exit else ''}let every worker "
                "take as many steps, or train inside `with gossip.join():`."
            )
        self.report_waiting_on(peer)
        end = time.monotonic() + patience
        while True:
            chain = list(takewhile(lambda rank: rank != self.rank, self.waiting_chain(peer)))
            if len(chain) > 1 or time.monotonic() > end:
                break
            time.sleep(min(0.05, patience))
        if len(chain) == 1:
            return ExchangeError(f"{self.name(peer)} {problem}.")
        waits = "".join(f"{self.name(rank)}, which waited for " for rank in chain[:-1])
        me, culprit = self.name(self.rank), self.name(chain[-1])
        return ExchangeError(f"{culprit} stopped answering: {me} waited for {waits}it.")
