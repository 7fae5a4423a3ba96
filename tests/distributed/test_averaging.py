from __future__ import annotations

import pytest
import torch
from torch import nn

from matcha.distributed import run_threads
from matcha.distributed.averaging import Averaging
from matcha.distributed.buckets import fill_buckets
from matcha.distributed.seats import Seat


def averaging(transport):
    """Worker r has the weights (r, 2r, 0) and BatchNorm's running mean r."""
    seat = Seat(transport=transport, everyone=transport)
    model = nn.Sequential(nn.Linear(3, 1, bias=False), nn.BatchNorm1d(1))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 2.0, 0.0]]) * transport.rank)
        model[1].running_mean.fill_(transport.rank)
    return model, Averaging(seat, model, fill_buckets(model, bucket_bytes=100, buffers=False), 20)


def test_inside_is_the_average_and_after_are_the_own_values():
    def work(transport):
        model, average = averaging(transport)
        with average.averaged():
            inside = model[0].weight.flatten().tolist(), float(model[1].running_mean)
        return inside, model[0].weight.flatten().tolist(), float(model[1].running_mean)

    for rank, found in enumerate(run_threads(3, work)):
        assert found == (([1.0, 2.0, 0.0], 1.0), [rank, 2.0 * rank, 0.0], float(rank))


def test_own_values_come_back_after_an_error_too():
    def work(transport):
        model, average = averaging(transport)
        with pytest.raises(ZeroDivisionError), average.averaged():
            raise ZeroDivisionError
        return model[0].weight.flatten().tolist()

    assert run_threads(2, work)[1] == [1.0, 2.0, 0.0]


def test_the_distance_is_that_of_the_definition():
    distances = run_threads(3, lambda transport: averaging(transport)[1].consensus_distance())
    # Parameters only: (r − 1)² · (1² + 2²), averaged over r = 0, 1, 2.
    assert distances == pytest.approx([10 / 3] * 3)
