"""Emulated link speed: any transport, slowed down to what a real link would take."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from matcha.distributed.transports.base import Message, Pending, Transport
from matcha.distributed.transports.collectives import is_of_ring
from matcha.errors import InputError
from matcha.topology import Link

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
        self.pending = pending
        self.seconds = seconds

    def has_come(self) -> bool:
        return self.pending.has_come()

    def wait(self, timeout: float) -> None:
        # The fast transport delivers once both ends have posted: that is when a real link would
        # have started. The next message may already be posted; it waits for its turn here.
        self.pending.wait(timeout)
        time.sleep(self.seconds)
        self.seconds = 0.0
