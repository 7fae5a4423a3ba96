"""Emulation: workers as threads of one process, and links slowed down to a real one's speed.

`MemoryNetwork` and `MemoryTransport` are public as `matcha.testing`.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from matcha.distributed.transports.base import Message, Pending, Transport
from matcha.distributed.transports.collectives import is_of_ring
from matcha.distributed.transports.waiting import StallDetector
from matcha.errors import InputError
from matcha.topology import Link

Mailbox = queue.SimpleQueue[torch.Tensor]


class MemoryNetwork:
    """The shared mailboxes and notes of the workers of one run.

    >>> network = MemoryNetwork(2)
    >>> [network.transport(rank).rank for rank in range(2)]
    [0, 1]
    """

    def __init__(self, num_workers: int) -> None:
        if num_workers < 1:
            raise InputError(f"a network needs at least one worker, not {num_workers}")
        self.num_workers = num_workers
        self._mailboxes: dict[tuple[int, int, int], Mailbox] = {}
        self.notes: dict[tuple[int, str], str] = {}

    def transport(self, rank: int) -> MemoryTransport:
        """The transport of worker `rank`."""
        return MemoryTransport(self, rank)

    def mailbox(self, source: int, target: int, tag: int) -> Mailbox:
        """Where messages with one tag from `source` wait for `target`."""
        return self._mailboxes.setdefault((source, target, tag), queue.SimpleQueue())  # atomic


class MemoryTransport(Transport):
    """One thread's end of a `MemoryNetwork`."""

    device = None
    threads = True

    def __init__(self, network: MemoryNetwork, rank: int) -> None:
        self.network, self.rank, self.num_workers = network, rank, network.num_workers

    def post(self, messages: Sequence[Message]) -> Pending:
        """Put copies of what is sent into the peers' mailboxes."""
        for message in messages:
            if message.outgoing is not None:
                box = self.network.mailbox(self.rank, message.peer, message.tag)
                box.put(message.outgoing.clone())
        return _Arrivals(self, [message for message in messages if message.incoming is not None])

    def set_note(self, key: str, value: str) -> None:
        """Write it to the network's notes."""
        self.network.notes[self.rank, key] = value

    def get_note(self, rank: int, key: str) -> str:
        """Read it from the network's notes."""
        return self.network.notes.get((rank, key), "")


class _Arrivals(Pending):
    def __init__(self, transport: MemoryTransport, messages: list[Message]) -> None:
        self.transport, self.messages = transport, messages

    def has_come(self) -> bool:
        network, rank = self.transport.network, self.transport.rank
        boxes = (network.mailbox(m.peer, rank, m.tag) for m in self.messages)
        return not any(box.empty() for box in boxes)

    def wait(self, timeout: float) -> None:
        transport = self.transport
        while self.messages:
            message = self.messages[0]
            box = transport.network.mailbox(message.peer, transport.rank, message.tag)
            detector = StallDetector(transport, message.peer, timeout)
            arrived = None
            while arrived is None:
                try:
                    arrived = box.get(timeout=detector.slice)
                except queue.Empty:
                    detector.look()
            detector.end()
            assert message.incoming is not None
            message.incoming.copy_(arrived)
            self.messages.pop(0)


_FORWARDED = (
    "rank", "num_workers", "device", "hosts", "doing", "period", "failed", "threads",
    "asynchronous", "has_tree", "members", "tree_call", "expect_model", "set_note", "get_note",
    "report_waiting_on", "waiting_on", "probe", "close",
)  # fmt: skip


class SlowLinks(Transport):
    """A transport whose every link is emulated to carry `mbps` megabits per second each way.

    Some links may be `slower` by factors, and a step of a ring all-reduce takes `hop` times as long
    as a link (`matcha.timing.ring_hop`), where its ring follows the links of a graph. A message
    takes its size over the speed, counted from the moment both ends are there. Links of a matching
    are slow at the same time, and a worker's messages follow one another, so a round takes what the
    delay model says: one matching after the other.

    This is an emulation by sleeping, for demonstrations without a shaped network; say so next to
    every number measured with it. `benchmarks/network` shapes real links. Collective calls over a
    tree are not part of training and run at full speed.
    """

    def __init__(
        self,
        transport: Transport,
        mbps: float,
        slower: Mapping[Link, float] | None = None,
        *,
        hop: float = 1.0,
    ) -> None:
        if not mbps > 0:
            raise InputError(f"link speed must be positive, not {mbps} Mbit/s")
        self.transport = transport
        self.seconds_per_byte = 8e-6 / mbps
        self._hop = hop
        self._slower = {frozenset(link): factor for link, factor in (slower or {}).items()}
        self._at_full_speed = False

    def post(self, messages: Sequence[Message]) -> Pending:
        """Start the messages; their `Pending` takes the time of the emulated link."""
        seconds = 0.0
        if not self._at_full_speed:
            each = [(m, self.seconds_per_byte * self._factor(m)) for m in messages]
            outgoing = sum(s * m.outgoing.nbytes for m, s in each if m.outgoing is not None)
            incoming = sum(s * m.incoming.nbytes for m, s in each if m.incoming is not None)
            seconds = max(outgoing, incoming)
        return _Slow(self.transport.post(messages), seconds)

    def _factor(self, message: Message) -> float:
        if is_of_ring(message):
            return self._hop
        return self._slower.get(frozenset((self.rank, message.peer)), 1.0)

    @contextmanager
    def at_full_speed(self) -> Iterator[None]:
        """Turn the emulation off for what is not part of training; on all workers together."""
        self._at_full_speed = True
        try:
            yield
        finally:
            self._at_full_speed = False


def _forward(name: str) -> property:
    """An attribute of the transport below, which makes the errors and does the waiting."""
    return property(
        lambda slow: getattr(slow.transport, name),
        lambda slow, value: setattr(slow.transport, name, value),
    )


for _name in _FORWARDED:
    setattr(SlowLinks, _name, _forward(_name))


class _Slow(Pending):
    def __init__(self, pending: Pending, seconds: float) -> None:
        self.pending, self.seconds = pending, seconds

    def has_come(self) -> bool:
        return self.pending.has_come()

    def wait(self, timeout: float) -> None:
        # The fast transport delivers once both ends have posted: that is when a real link would
        # have started. The next message may already be posted; it waits for its turn here.
        self.pending.wait(timeout)
        time.sleep(self.seconds)
        self.seconds = 0.0
