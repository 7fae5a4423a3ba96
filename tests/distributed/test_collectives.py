from __future__ import annotations

import pytest
import torch

from matcha.distributed import run_threads
from matcha.distributed.collectives import barrier, broadcast, gather, mean_, ring_mean_


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
