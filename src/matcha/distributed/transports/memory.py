"""In-memory transport: workers are threads of one process; public as `matcha.testing`."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Sequence

import torch

from matcha.distributed.transports.base import Message, Pending, Transport
from matcha.distributed.transports.waiting import StallDetector
from matcha.errors import InputError

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
        self._mailboxes: defaultdict[tuple[int, int, int], Mailbox] = defaultdict(queue.SimpleQueue)
        self._lock = threading.Lock()
        self.notes: dict[tuple[int, str], str] = {}

    def transport(self, rank: int) -> MemoryTransport:
        """The transport of worker `rank`."""
        return MemoryTransport(self, rank)

    def mailbox(self, source: int, target: int, tag: int) -> Mailbox:
        """Where messages with one tag from `source` wait for `target`."""
        with self._lock:
            return self._mailboxes[source, target, tag]


class MemoryTransport(Transport):
    """One thread's end of a `MemoryNetwork`."""

    device = None
    threads = True

    def __init__(self, network: MemoryNetwork, rank: int) -> None:
        self.network = network
        self.rank = rank
        self.num_workers = network.num_workers

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
        self.transport = transport
        self.messages = messages

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
