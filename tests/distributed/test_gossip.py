from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from tests.distributed import cases
from tests.distributed.perceptrons import (
    PLAN,
    double_step,
    flat,
    mlp,
    plain_step,
    single_worker,
    train,
)
from torch import nn

import matcha
from matcha import families
from matcha.distributed import Gossip
from matcha.errors import ExchangeError, InputError
from matcha.testing import MemoryTransport, run_threads


@pytest.mark.parametrize(("strategy", "mixing", "rule"), cases.CASES)
def test_every_case_in_memory_equals_the_definition(strategy, mixing, rule) -> None:
    plan = cases.real_plan(strategy, mixing)
    results = run_threads(cases.NUM_WORKERS, lambda t: cases.train(t, plan, rule))
    cases.check(results, plan, rule)


# -- models and optimizers that never heard of us --------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_keeps_its_own_state(kind) -> None:
    trained = train(mlp, double_step, kind, steps=4)
    for (model, _), reference in zip(trained, single_worker(4, kind), strict=True):
        assert torch.allclose(flat(model), reference, rtol=0, atol=1e-10)


def test_gradient_accumulation_exchanges_once_a_step() -> None:
    def step(model, optimizer, batch) -> None:
        optimizer.zero_grad()
        for half in batch.double().chunk(2):
            (model(half).square().mean() / 2).backward()
        optimizer.step()

    trained = train(mlp, step, steps=4)
    for (model, gossip), reference in zip(trained, single_worker(4, torch.optim.SGD), strict=True):
        assert gossip.iteration == 4
        assert torch.allclose(flat(model), reference, rtol=0, atol=1e-10)


def test_a_compiled_model_goes_on_working() -> None:
    lock = threading.Lock()  # dynamo compiles one thread at a time

    def make() -> nn.Module:
        model = mlp()
        model.compile(backend="aot_eager")
        return model

    def step(model, optimizer, batch) -> None:
        optimizer.zero_grad()
        with lock:
            model(batch.double()).square().mean().backward()
        optimizer.step()

    trained = train(make, step, steps=3)
    for (model, _), reference in zip(trained, single_worker(3, torch.optim.SGD), strict=True):
        assert torch.allclose(flat(model), reference, rtol=0, atol=1e-10)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)
        self.outer = nn.Linear(4, 4, bias=False)
        self.outer.weight = self.inner.weight
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.low = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x)) * self.low.float() + self.frozen


def test_tied_frozen_and_mixed_parameters() -> None:
    trained = train(Tied, steps=20)
    first = trained[0][0]
    for model, gossip in trained:
        assert model.inner.weight is model.outer.weight
        assert {b.data.dtype for b in gossip.state.buckets} == {torch.float32, torch.bfloat16}
        assert torch.equal(model.frozen, first.frozen)  # equal by the first broadcast
        assert not torch.equal(model.inner.weight, torch.zeros(4, 4))
        # Constant full rounds: workers stay near one another though their data differ.
        assert (model.inner.weight - first.inner.weight).abs().max() < 0.2


def test_workers_start_from_worker_0() -> None:
    trained = train(lambda: nn.Linear(4, 1), steps=0)
    assert all(torch.equal(flat(model), flat(trained[0][0])) for model, _ in trained)


def test_batchnorm_buffers_stay_local_or_are_averaged() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))

    def spread(**options: Any) -> float:
        trained = train(make, steps=5, **options)
        means = torch.stack([model[1].running_mean for model, _ in trained])
        assert all(int(model[1].num_batches_tracked) == 5 for model, _ in trained)
        return float(means.std(0).max())

    local = spread()
    assert 0 < spread(buffers="average") < local / 2
    assert 0 < spread(buffers="average", overlap=True) < local


def test_a_step_left_out_by_hand_takes_part_by_skip_step() -> None:
    def work(transport: MemoryTransport) -> int:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Gossip(model, optimizer, PLAN, transport=transport, timeout=30) as gossip:
            for k in range(3):
                if transport.rank == k:
                    gossip.step()
                else:
                    double_step(model, optimizer, torch.ones(2, 4))
            return gossip.iteration

    assert set(run_threads(8, work)) == {3}


# -- the average -----------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_the_average_model_is_exported_and_own_values_come_back(overlap) -> None:
    def work(transport: MemoryTransport):
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Gossip(
            model, optimizer, PLAN, transport=transport, timeout=30, overlap=overlap
        ) as gossip:
            generator = torch.Generator().manual_seed(transport.rank)
            for _ in range(3):
                batch = torch.randn(16, 4, generator=generator, dtype=torch.float64)
                plain_step(model, optimizer, batch)
            own = [t.clone() for t in (*model.parameters(), *model.buffers())]
            distance = gossip.consensus_distance()
            with gossip.averaged() as average:
                assert average is model
                exported = copy.deepcopy(average)
            for before, now in zip(own, (*model.parameters(), *model.buffers()), strict=True):
                assert torch.equal(before, now)
        return flat(model), flat(exported), exported[1].running_mean, own[-3], distance

    results = run_threads(8, work)
    own = torch.stack([result[0] for result in results])
    centre = own.mean(0)
    for _, exported, running_mean, _, distance in results:
        assert torch.allclose(exported, centre, atol=1e-12)
        assert torch.allclose(running_mean, torch.stack([r[3] for r in results]).mean(0))
        assert distance == pytest.approx(float((own - centre).square().sum(1).mean()))


# -- refusals --------------------------------------------------------------------------------------


def refused(num_workers: int = 8, sentence: str = "", plan: Any = PLAN, **options: Any) -> None:
    def work(transport: MemoryTransport) -> None:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        chosen = plan(transport.rank) if callable(plan) else plan
        with pytest.raises((InputError, ExchangeError), match=sentence):
            Gossip(model, optimizer, chosen, transport=transport, timeout=10, **options)

    run_threads(num_workers, work)


def test_another_plan_or_seed_is_refused_by_name() -> None:
    other = cases.make_plan("matcha", "pairwise")
    refused(8, r"rank 5 \(host .*another plan", plan=lambda r: other if r == 5 else PLAN)
    seeded = cases.make_plan("vanilla", "laplacian", seed=9)
    refused(8, r"rank 1 \(host .*another seed \('9'", plan=lambda r: seeded if r == 1 else PLAN)


def test_another_model_is_refused_by_name() -> None:
    def work(transport: MemoryTransport) -> None:
        model = nn.Linear(4, 3 if transport.rank == 6 else 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(InputError, match=r"rank 6 \(host .*another model"):
            Gossip(model, optimizer, PLAN, transport=transport, timeout=10)

    run_threads(8, work)


def test_after_detach_the_model_trains_alone() -> None:
    trained = train(mlp, double_step, steps=2)
    model, gossip = trained[0]
    optimizer = gossip.state.optimizers[0]
    gossip.detach()
    before = flat(model)
    double_step(model, optimizer, torch.ones(2, 4))
    assert gossip.iteration == 2
    assert not torch.equal(flat(model), before)


# -- exact averages --------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_local_sgd_gives_everybody_the_same_model_when_it_averages(overlap) -> None:
    plan = matcha.plan(families.ring(cases.NUM_WORKERS), 0.5, "local")
    period = next(k for k in range(99) if plan.round(k)) + 1
    for steps, same in ((period, not overlap), (period + 1, False)):
        found = train(lambda: nn.Linear(4, 2), plan=plan, steps=steps, overlap=overlap)
        weights = [model.weight.detach() for model, _ in found]
        assert all(torch.equal(w, weights[0]) for w in weights) is same
    assert found[0][1].state.exchange.bytes_sent >= 2 * 7 / 8 * 10 * 4


def test_silence_sends_nothing() -> None:
    plan = matcha.plan(families.ring(cases.NUM_WORKERS), 0.5, "silent")
    found = train(lambda: nn.Linear(4, 2), plan=plan)
    assert all(gossip.state.exchange.bytes_sent == 0 for _, gossip in found)
