from __future__ import annotations

import pytest
import torch

from matcha.distributed.transports.collectives import (
    agree,
    barrier,
    broadcast,
    differences,
    gather,
    mean_,
    ring_mean_,
)
from matcha.distributed.transports.torch import _is_sign
from matcha.errors import InputError
from matcha.testing import MemoryTransport, run_threads


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5, 8, 13])
def test_collectives_for_any_number_of_workers(num_workers: int) -> None:
    def work(transport):
        shared = torch.full((4,), float(transport.rank + 10))
        broadcast(transport, [shared], 10)
        values = torch.arange(3.0) * transport.rank
        count = torch.tensor([transport.rank])
        mean_(transport, [values], 10)
        broadcast(transport, [count], 10)
        barrier(transport, 10)
        return shared, values, count, gather(transport, b"x" * transport.rank, 10)

    for shared, values, count, gathered in run_threads(num_workers, work):
        assert torch.equal(shared, torch.full((4,), 10.0))
        assert torch.allclose(values, torch.arange(3.0) * (num_workers - 1) / 2)
        assert count.item() == 0
        assert gathered == [b"x" * rank for rank in range(num_workers)]


@pytest.mark.parametrize("num_workers", [1, 2, 3, 8])
@pytest.mark.parametrize("size", [1, 5, 64])
def test_a_ring_gives_every_worker_the_same_mean(num_workers: int, size: int) -> None:
    def work(transport):
        values = torch.arange(float(size)) + transport.rank
        sent = ring_mean_(transport, [values], 10)
        return values, sent

    found = run_threads(num_workers, work)
    expected = torch.arange(float(size)) + (num_workers - 1) / 2
    for values, _ in found:
        assert torch.allclose(values, expected)
        assert torch.equal(values, found[0][0])
    total = sum(sent for _, sent in found)
    assert total == 2 * (num_workers - 1) * size * 4


def test_agreeing_workers_learn_their_hosts() -> None:
    def work(transport):
        agree(transport, {"plan": "a"}, 10)
        return transport.hosts, transport.name(1)

    hosts, name = run_threads(3, work)[2]
    assert len(hosts) == 3
    assert name == f"rank 1 (host {hosts[1]})"


def test_every_worker_hears_who_differs_in_what() -> None:
    def work(transport) -> str:
        facts = {"plan": "b" if transport.rank == 2 else "a", "model": "m"}
        with pytest.raises(InputError) as caught:
            agree(transport, facts, 10)
        return str(caught.value)

    texts = run_threads(4, work)
    assert len(set(texts)) == 1
    assert "rank 2 (host" in texts[0]
    assert "another plan ('b', others 'a')" in texts[0]
    assert "rank 0" not in texts[0]


def test_in_a_tie_the_lowest_rank_is_right() -> None:
    assert [rank for rank, _ in differences([{"a": "1"}, {"a": "2"}])] == [1]


def test_all_wait_first_for_a_sign_of_life_while_a_worker_is_away() -> None:
    """Gloo waits patiently for one number; twelve sizes were no such sign, and ended the group."""

    def work(transport: MemoryTransport) -> list[bool]:
        waits = []
        post = transport.post

        def recording(messages):
            waits.extend(_is_sign(message) for message in messages if message.incoming is not None)
            return post(messages)

        transport.post = recording
        gather(transport, b"ok", 10)
        return waits

    _, *others = run_threads(12, work)
    assert all(waits[0] for waits in others)
