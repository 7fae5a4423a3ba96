from __future__ import annotations

import time

import pytest
import torch

from matcha.distributed import Message, SlowLinks
from matcha.distributed.transports.base import Tag
from matcha.errors import InputError
from matcha.testing import run_threads


def test_a_message_takes_at_least_its_size_over_the_speed() -> None:
    def work(transport) -> float:
        slow = SlowLinks(transport, mbps=8)  # a megabyte a second
        incoming, outgoing = torch.zeros(25_000), torch.ones(25_000)  # 100 kB each way at once
        started = time.perf_counter()
        message = Message(peer=1 - slow.rank, tag=0, incoming=incoming, outgoing=outgoing)
        slow.post([message]).wait(10)
        assert torch.equal(incoming, outgoing)
        return time.perf_counter() - started

    assert min(run_threads(2, work)) >= 0.1


def test_a_slower_link_and_a_ring_take_their_own_time() -> None:
    def work(transport) -> list[float]:
        slow = SlowLinks(transport, mbps=1e6, slower={(0, 1): 10_000.0}, hop=20_000.0)
        seconds = []
        for tag in (0, Tag.RING):
            incoming, outgoing = torch.zeros(125_000), torch.ones(125_000)  # half a megabyte
            message = Message(peer=1 - slow.rank, tag=tag, incoming=incoming, outgoing=outgoing)
            started = time.perf_counter()
            slow.post([message]).wait(10)
            seconds.append(time.perf_counter() - started)
        return seconds

    for meeting, ring in run_threads(2, work):
        assert meeting >= 0.04
        assert ring >= 0.08


def test_measurements_go_at_full_speed() -> None:
    def work(transport) -> float:
        slow = SlowLinks(transport, mbps=0.001)  # the message below would take 200 s
        incoming, outgoing = torch.zeros(6_250), torch.ones(6_250)
        message = Message(peer=1 - slow.rank, tag=0, incoming=incoming, outgoing=outgoing)
        with slow.at_full_speed():
            pending = slow.post([message])
        started = time.perf_counter()
        pending.wait(10)
        assert torch.equal(incoming, outgoing)
        return time.perf_counter() - started

    assert max(run_threads(2, work)) < 100


def test_a_speed_must_be_positive() -> None:
    with pytest.raises(InputError, match="positive"):
        run_threads(1, lambda transport: SlowLinks(transport, 0))
