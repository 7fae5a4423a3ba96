"""Probing: how long every link of a topology really takes, between the workers that will use it."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass

import torch

from matcha.distributed.transports.base import Message, Transport
from matcha.distributed.transports.collectives import agree, barrier, gather
from matcha.errors import InputError
from matcha.matchings import decompose
from matcha.topology import Link, Topology

__all__ = ["LinkMeasure", "exchange_time", "probe"]

_SMALL = 8  # bytes: as short as a message gets


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkMeasure:
    """One link, both ends sending at once, as an exchange does: a line through two sizes."""

    link: Link
    latency: float
    """Seconds that a message of any size takes."""
    seconds_per_megabyte: float | None
    """What each megabyte adds; None where larger messages took no longer, so that nothing but
    luck was measured: then all of `seconds` is latency."""
    seconds: float
    """Of a message of the asked size each way: the link's time."""
    message_bytes: int

    @property
    def mbps(self) -> float | None:
        """Megabits per second each way; None where the messages were too small to tell."""
        return None if self.seconds_per_megabyte is None else 8 / self.seconds_per_megabyte


def probe(
    topology: Topology,
    transport: Transport,
    *,
    message_mb: float = 4.0,
    repetitions: int = 5,
    timeout: float = 300.0,
) -> tuple[LinkMeasure, ...]:
    """Measure every link of a topology. A collective call; every worker gets all answers.

    Two sizes of message, a few bytes and the asked ones, give a latency and seconds per megabyte.
    Links of a matching are measured at the same time, as a round uses them, and one matching after
    the other, so that no worker has two partners at once.

    Args:
        topology: as many workers as the transport has.
        transport: how messages travel.
        message_mb: the size of a message: the model's parameters, in megabytes.
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
    message_bytes = int(message_mb * 1e6)
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
                latency = exchange_time(transport, peer, _SMALL, 4 * repetitions, timeout)
                seconds = exchange_time(transport, peer, message_bytes, repetitions, timeout)
                mine.append((link, latency, seconds))
    answers = gather(transport, json.dumps(mine).encode(), timeout)
    ends: dict[Link, list[tuple[float, float]]] = {link: [] for link in topology.links}
    for answer in answers:
        for (i, j), latency, seconds in json.loads(answer):
            ends[i, j].append((latency, seconds))
    measures = []
    for link, found in ends.items():
        # An exchange is over when both ends have it: the slower end counts.
        small, large = (max(column) for column in zip(*found, strict=True))
        latency, pace = fit(_SMALL, small, message_bytes, large)
        told = {"link": link, "seconds": large, "message_bytes": message_bytes}
        measures.append(LinkMeasure(latency=latency, seconds_per_megabyte=pace, **told))
    return tuple(measures)


def fit(
    small_bytes: int, small: float, large_bytes: int, large: float
) -> tuple[float, float | None]:
    """Latency and seconds per megabyte of the line through two measurements.

    Scheduling moves a measurement by some tenths; a difference below a tenth says nothing of the
    speed, and a quotient by it would be absurd.

    >>> fit(0, 0.001, 1_000_000, 0.101)
    (0.001, 0.1)
    >>> fit(8, 0.001, 1_000_000, 0.001)
    (0.001, None)
    """
    if large_bytes <= small_bytes or large - small < 0.1 * large:
        return large, None
    pace = (large - small) / (1e-6 * (large_bytes - small_bytes))
    return max(0.0, small - pace * 1e-6 * small_bytes), pace


def exchange_time(
    transport: Transport, peer: int, size: int, repetitions: int, timeout: float
) -> float:
    """Seconds of a message of some bytes each way, to a worker that makes the same call."""
    device = transport.device or torch.device("cpu")
    sent = [torch.ones(n, dtype=torch.uint8, device=device) for n in (_SMALL, size)]
    pairs = [(torch.zeros_like(outgoing), outgoing) for outgoing in sent]
    times = []
    for _ in range(repetitions + 1):
        for incoming, outgoing in pairs:  # the short one first, so that both start together
            started = time.perf_counter()
            message = Message(peer=peer, tag=1, incoming=incoming, outgoing=outgoing)
            transport.post([message]).wait(timeout)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])  # the first opens the way
