"""Emulated link speed: any transport, slowed down to what a real link would take."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from matcha.distributed.transports.base import Message, Pending, Transport
from matcha.errors import InputError

__all__ = ["SlowLinks"]


class SlowLinks(Transport):
    """A transport whose every link is emulated to carry `mbps` megabits a second each way.

    A message takes its size over the speed, counted from the moment both ends are there. Links of a
    matching are slow at the same time, and a worker's messages follow one another, so a round takes
    what the delay model says: the matchings one after the other.

    This is an emulation by sleeping, for demonstrations without a shaped network; say so next to
    every number measured with it. `benchmarks/network` shapes real links.
    """

    def __init__(self, transport: Transport, mbps: float) -> None:
        if not mbps > 0:
            raise InputError(f"link speed must be positive, not {mbps} Mbit/s")
        self.transport = transport
        self.seconds_per_byte = 8e-6 / mbps
        self._at_full_speed = False
        self.rank = transport.rank
        self.num_workers = transport.num_workers
        self.device = transport.device
        self.threads = transport.threads
        self.council = transport.council  # whose calls are no part of training: at full speed

    @property
    def hosts(self) -> tuple[str, ...]:
        """As the transport below, which makes the errors."""
        return self.transport.hosts

    @hosts.setter
    def hosts(self, hosts: tuple[str, ...]) -> None:
        self.transport.hosts = hosts

    @property
    def members(self) -> tuple[int, ...]:
        """As the transport below."""
        return self.transport.members

    def post(self, messages: Sequence[Message]) -> Pending:
        """Start the messages; their `Pending` takes the time of the emulated link."""
        outgoing = sum(m.outgoing.nbytes for m in messages if m.outgoing is not None)
        incoming = sum(m.incoming.nbytes for m in messages if m.incoming is not None)
        seconds = 0.0 if self._at_full_speed else max(outgoing, incoming) * self.seconds_per_byte
        return _Slow(self.transport.post(messages), seconds)

    @contextmanager
    def at_full_speed(self) -> Iterator[None]:
        """Without the emulation, for what is no part of training; on all workers together."""
        self._at_full_speed = True
        try:
            yield
        finally:
            self._at_full_speed = False

    @property
    def doing(self) -> str:
        """As the transport below, which does the waiting."""
        return self.transport.doing

    @doing.setter
    def doing(self, doing: str) -> None:
        self.transport.doing = doing

    @property
    def period(self) -> int:
        """As the transport below."""
        return self.transport.period

    @period.setter
    def period(self, period: int) -> None:
        self.transport.period = period

    @property
    def failed(self) -> bool:
        """As the transport below."""
        return self.transport.failed

    @failed.setter
    def failed(self, failed: bool) -> None:
        self.transport.failed = failed

    @property
    def asynchronous(self) -> bool:
        """As the transport below."""
        return self.transport.asynchronous

    @asynchronous.setter
    def asynchronous(self, asynchronous: bool) -> None:
        self.transport.asynchronous = asynchronous

    def probe(self, peer: int) -> None:
        """As the transport below."""
        self.transport.probe(peer)

    def set_note(self, what: str, value: str) -> None:
        """As the transport below."""
        self.transport.set_note(what, value)

    def get_note(self, rank: int, what: str) -> str:
        """As the transport below."""
        return self.transport.get_note(rank, what)

    def report_waiting_on(self, peer: int | None) -> None:
        """As the transport below."""
        self.transport.report_waiting_on(peer)

    def waiting_on(self, rank: int) -> int | None:
        """As the transport below."""
        return self.transport.waiting_on(rank)

    def close(self) -> None:
        """As the transport below."""
        self.transport.close()


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
