from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from tests.distributed import cases
from tests.distributed.perceptrons import Fixed, double_step, flat, mlp
from torch import nn

from matcha.distributed import Gossip, MemoryTransport, run_threads
from matcha.distributed.averaging import Averaging
from matcha.distributed.exchange.buckets import fill_buckets
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


@pytest.mark.parametrize("mixing", ["laplacian", "pairwise"])
def test_complex_parameters_are_mixed_and_averaged(mixing) -> None:
    plan = cases.make_plan("vanilla", mixing)
    start = torch.randn(8, 5, dtype=torch.complex128)

    def work(transport: MemoryTransport):
        model = nn.ParameterList([torch.zeros(5, dtype=torch.complex128)])
        model.register_buffer("waves", start[transport.rank].clone())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Gossip(model, optimizer, plan, transport=transport, deadline=30) as gossip:
            with torch.no_grad():
                model[0].copy_(start[transport.rank])
                model.waves.copy_(start[transport.rank])
            distance = gossip.consensus_distance()
            state = gossip.averaged_state_dict()
            gossip.skip_step()
            return model[0].detach().clone(), state, distance

    results = run_threads(8, work)
    centre = start.mean(0)
    mixed = plan.round(0).mix(torch.view_as_real(start).reshape(8, 10).numpy())
    for rank, (value, state, distance) in enumerate(results):
        assert torch.allclose(state["0"], centre)
        assert torch.allclose(state["waves"], centre)
        assert distance == pytest.approx(float((start - centre).abs().square().sum(1).mean()))
        np.testing.assert_allclose(torch.view_as_real(value).flatten(), mixed[rank], atol=1e-12)


def test_the_average_to_save_has_memory_of_its_own() -> None:
    lock = threading.Lock()

    def work(transport: MemoryTransport) -> tuple[torch.Tensor, torch.Tensor]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Gossip(model, optimizer, Fixed(2), transport=transport, deadline=30) as gossip:
            double_step(model, optimizer, torch.full((2, 4), 1.0 + transport.rank))
            own = flat(model)
            state = gossip.averaged_state_dict()
            with torch.no_grad(), lock:
                model[0].weight.zero_()
            return own, torch.cat([value.flatten() for value in state.values()])

    (one, average), (two, same) = run_threads(2, work)
    assert torch.equal(average, same)
    assert torch.allclose(average, (one + two) / 2)
