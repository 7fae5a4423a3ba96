"""Probing: how long every link of a topology really takes, between the workers that will use it."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from matcha.distributed.agreement import agree
from matcha.distributed.collectives import barrier, gather
from matcha.distributed.transports.transport import Message, Transport
from matcha.errors import InputError
from matcha.matchings import decompose
from matcha.topology import Link, Topology

__all__ = ["LinkMeasure", "probe"]

_SMALL = 8  # bytes: as short as a message gets


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkMeasure:
    """One link, both ends sending at once, as an exchange does."""

    link: Link
    latency: float
    """Seconds of a message of a few bytes each way."""
    seconds: float
    """Of a message of the asked size each way: the link's time."""
    message_bytes: int

    @property
    def mbps(self) -> float:
        """Megabits a second each way, latency taken off where it is the smaller part.

        A message that takes no longer than an empty one says nothing of the speed but a bound.
        """
        moving = self.seconds - self.latency
        return 8e-6 * self.message_bytes / (moving if moving > 0.1 * self.seconds else self.seconds)


def probe(
    topology: Topology,
    transport: Transport,
    *,
    message_bytes: int = 4_000_000,
    repetitions: int = 5,
    timeout: float = 300.0,
) -> tuple[LinkMeasure, ...]:
    """Measure every link of a topology. A collective call; every worker gets all answers.

    Links of a matching are measured at the same time, as a round uses them, and one matching after
    the other, so that no worker has two partners at once.

    Args:
        topology: as many workers as the transport has.
        transport: how messages travel.
        message_bytes: the size of the model's parameters.
        repetitions: of which the median counts.
        timeout: seconds to wait for any one message.

    Raises:
        InputError: another number of workers, or nothing to measure with.
        ExchangeError: a worker does not answer.
    """
    if transport.num_workers != topology.num_workers:
        raise InputError(
            f"the topology has {topology.num_workers} workers, but {transport.num_workers} were "
            f"started: start {topology.num_workers}."
        )
    if message_bytes < 1 or repetitions < 1:
        raise InputError("a probe needs a message of at least 1 byte and at least 1 repetition.")
    settings = f"{message_bytes} bytes, {repetitions} times"
    agree(transport, {"topology": str(topology.links), "probe": settings}, timeout)
    mine = []
    for matching in decompose(topology):
        barrier(transport, timeout)
        for link in matching:
            if transport.rank in link:
                peer = link[0] + link[1] - transport.rank
                latency = _exchange_time(transport, peer, _SMALL, 4 * repetitions, timeout)
                seconds = _exchange_time(transport, peer, message_bytes, repetitions, timeout)
                mine.append((link, latency, seconds))
    answers = gather(transport, json.dumps(mine).encode(), timeout)
    ends: dict[Link, list[tuple[float, float]]] = {link: [] for link in topology.links}
    for answer in answers:
        for (i, j), latency, seconds in json.loads(answer):
            ends[i, j].append((latency, seconds))
    return tuple(_measure(link, found, message_bytes) for link, found in ends.items())


def _measure(link: Link, ends: Sequence[tuple[float, float]], message_bytes: int) -> LinkMeasure:
    # An exchange is over when both ends have it: the slower end counts.
    latency, seconds = (max(column) for column in zip(*ends, strict=True))
    return LinkMeasure(link=link, latency=latency, seconds=seconds, message_bytes=message_bytes)


def _exchange_time(
    transport: Transport, peer: int, size: int, repetitions: int, timeout: float
) -> float:
    device = transport.device or torch.device("cpu")
    incoming = torch.zeros(size, dtype=torch.uint8, device=device)
    outgoing = torch.ones(size, dtype=torch.uint8, device=device)
    ready = torch.zeros(_SMALL, dtype=torch.uint8, device=device)
    times = []
    for repetition in range(repetitions + 1):
        _exchange(transport, peer, ready, ready.clone(), timeout)  # so that both start together
        started = time.perf_counter()
        _exchange(transport, peer, incoming, outgoing, timeout)
        if repetition:  # the first opens the way
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def _exchange(
    transport: Transport,
    peer: int,
    incoming: torch.Tensor,
    outgoing: torch.Tensor,
    timeout: float,
) -> None:
    message = Message(peer=peer, tag=1, incoming=incoming, outgoing=outgoing)
    transport.post([message]).wait(timeout)
