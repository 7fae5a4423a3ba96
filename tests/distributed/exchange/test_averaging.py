from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from tests.distributed import cases
from tests.distributed.perceptrons import Fixed, double_step, flat, mlp
from torch import nn

from matcha.distributed import Gossip
from matcha.distributed.exchange.averaging import Averaging, _fingerprint
from matcha.distributed.exchange.buckets import fill_buckets
from matcha.distributed.launch.placement import Placement
from matcha.testing import MemoryTransport, run_threads


def averaging(transport):
    """Worker r has the weights (r, 2r, 0) and BatchNorm's running mean r."""
    placement = Placement(transport=transport, everyone=transport)
    model = nn.Sequential(nn.Linear(3, 1, bias=False), nn.BatchNorm1d(1))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 2.0, 0.0]]) * transport.rank)
        model[1].running_mean.fill_(transport.rank)
    return model, Averaging(
        placement, model, fill_buckets(model, bucket_bytes=100, buffers=False), lambda: 20.0
    )


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
        with Gossip(model, optimizer, plan, transport=transport, timeout=30) as gossip:
            with torch.no_grad():
                model[0].copy_(start[transport.rank])
                model.waves.copy_(start[transport.rank])
            distance = gossip.consensus_distance()
            state = gossip.averaged_state_dict()
            gossip.step()
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
        with Gossip(model, optimizer, Fixed(2), transport=transport, timeout=30) as gossip:
            double_step(model, optimizer, torch.full((2, 4), 1.0 + transport.rank))
            own = flat(model)
            state = gossip.averaged_state_dict()
            with torch.no_grad(), lock:
                model[0].weight.zero_()
            return own, torch.cat([value.flatten() for value in state.values()])

    (one, average), (two, same) = run_threads(2, work)
    assert torch.equal(average, same)
    assert torch.allclose(average, (one + two) / 2)


class Teacher(nn.Module):
    """As in BYOL, MoCo and DINO: a teacher without gradients follows the student."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher, self.frozen = (nn.Linear(4, 1) for _ in range(3))
        self.teacher.requires_grad_(False)
        self.frozen.requires_grad_(False)
        self.waves = nn.Parameter(torch.ones(2, dtype=torch.complex64), requires_grad=False)

    def follow(self, rate: float = 0.5) -> None:
        for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            own.data.mul_(1 - rate).add_(other.data, alpha=rate)  # raises no version counter


def test_what_changes_without_a_gradient_is_averaged_and_what_does_not_is_not_sent(
    monkeypatch,
) -> None:
    averaged: list[int] = []

    def work(transport: MemoryTransport):
        model = Teacher()
        optimizer = torch.optim.SGD(model.student.parameters(), lr=0.1)
        with Gossip(model, optimizer, Fixed(3), transport=transport, timeout=30) as gossip:
            model.student(torch.full((2, 4), 1.0 + transport.rank)).sum().backward()
            optimizer.step()
            model.follow()
            model.waves.data.mul_(1j * transport.rank)
            own = {name: value.clone() for name, value in model.state_dict().items()}
            state = gossip.averaged_state_dict()
            for name, value in model.state_dict().items():
                assert torch.equal(value, own[name])
            if transport.rank == 0:
                averaged.append(len(gossip.state.averaging._differing()))
            else:
                gossip.state.averaging._differing()
        return own, state

    results = run_threads(3, work)
    assert averaged == [2]  # the teacher's weight and the waves; biases had equal gradients
    for _, state in results:
        for name, value in state.items():
            mean = torch.stack([own[name] for own, _ in results]).mean(0)
            assert torch.allclose(value, mean), name


@pytest.mark.parametrize("buffers", ["local", "average"])
def test_variances_are_pooled_with_those_of_the_means(buffers) -> None:
    """Workers whose inputs lie around -2 and 2 see a variance of 1 each; together it is 5."""

    def work(transport: MemoryTransport):
        model = nn.Sequential(nn.BatchNorm1d(3, momentum=1.0), nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"transport": transport, "timeout": 30, "buffers": buffers}
        with Gossip(model, optimizer, Fixed(2), **options) as gossip:
            generator = torch.Generator().manual_seed(transport.rank)
            inputs = torch.randn(5000, 3, generator=generator) + 4 * transport.rank - 2 + 1000
            model(inputs)
            own = model[0].running_var.clone()
            with gossip.averaged():
                found = model[0].running_mean.clone(), model[0].running_var.clone()
            assert torch.equal(model[0].running_var, own)
            return inputs, *found

    results = run_threads(2, work)
    everything = torch.cat([inputs for inputs, *_ in results]).double()
    for _, mean, variance in results:
        assert torch.allclose(mean.double(), everything.mean(0), rtol=1e-6)
        assert torch.allclose(variance.double(), everything.var(0), rtol=1e-3)


def test_a_fingerprint_tells_tensors_apart() -> None:
    base = torch.arange(7.0)
    tensors = [base, base.flip(0), base + 1, base[1:], base.double(), torch.tensor(3.0)]
    assert len({_fingerprint(tensor) for tensor in tensors}) == len(tensors)
    assert _fingerprint(base[1:]) == _fingerprint(base[1:].clone())
    assert -(2**63) <= _fingerprint(torch.randn(1001)) < 2**63


class Mixed(nn.Module):
    """Complex and real parameters, running statistics, a counter, and a frozen teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.waves = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.norm = nn.BatchNorm1d(3, momentum=1.0)
        self.teacher = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("position", torch.tensor(0))


def test_the_average_of_a_checkpoint_is_that_of_averaged(tmp_path) -> None:
    """`load(average=True)` once left complex parameters as they were, and variances apart."""

    def make(transport: MemoryTransport) -> tuple[Mixed, Gossip]:
        model = Mixed()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        return model, Gossip(model, optimizer, Fixed(2), transport=transport, timeout=30)

    def save(transport: MemoryTransport) -> dict:
        model, gossip = make(transport)
        with torch.no_grad():
            model.waves.add_(1j * (1 + transport.rank))
            model.teacher.add_(transport.rank)
            model.position.fill_(7)
        generator = torch.Generator().manual_seed(transport.rank)
        model.norm(torch.randn(50, 3, generator=generator) + 4 * transport.rank)
        gossip.save(tmp_path)
        return gossip.averaged_state_dict()

    def load(transport: MemoryTransport) -> dict:
        model, gossip = make(transport)
        gossip.load(tmp_path, average=True)
        return model.state_dict()

    expected = run_threads(2, save)[0]
    assert expected["norm.running_var"].min() > 3
    for found in run_threads(2, load):
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=1e-5), name
