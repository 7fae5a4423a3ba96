from __future__ import annotations

import pytest
import torch

from matcha.distributed import run_threads
from matcha.distributed.collectives import barrier, broadcast, gather, mean_


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
