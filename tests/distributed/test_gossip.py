from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.distributed import cases
from torch import nn

import matcha
from matcha import Plan, Round, families
from matcha.distributed import Gossip, MemoryTransport, SlowLinks, run_threads
from matcha.errors import ExchangeError, InputError
from matcha.wires import Float


@pytest.mark.parametrize(("strategy", "mixing", "rule"), cases.CASES)
def test_every_case_in_memory_equals_the_definition(strategy, mixing, rule) -> None:
    plan = cases.real_plan(strategy, mixing)
    results = run_threads(cases.NUM_WORKERS, lambda t: cases.train(t, plan, rule))
    cases.check(results, plan, rule)


# -- models and optimizers that never heard of us --------------------------------------------------

PLAN = cases.make_plan("vanilla", "laplacian")
SEEDING = threading.Lock()  # threads share torch's generator


def train(
    make: Callable[[], nn.Module],
    step: Callable[[nn.Module, torch.optim.Optimizer, torch.Tensor], None] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    plan: Any = PLAN,
    steps: int = 3,
    **options: Any,
) -> list[tuple[nn.Module, Gossip]]:
    """Train on each worker's own batches (4 inputs) and return every worker's model and gossip."""

    def work(transport: MemoryTransport) -> tuple[nn.Module, Gossip]:
        with SEEDING:
            torch.manual_seed(transport.rank)
            model = make()
        chosen = optimizer((p for p in model.parameters() if p.requires_grad), lr=0.1)
        settings = {"transport": transport, "deadline": 30.0, **options}
        gossip = Gossip(model, chosen, plan, **settings)
        generator = torch.Generator().manual_seed(transport.rank)
        for _ in range(steps):
            batch = torch.randn(16, 4, generator=generator)
            (step or plain_step)(model, chosen, batch)
        gossip.detach()
        return model, gossip

    return run_threads(plan.num_workers, work)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def mlp() -> nn.Module:
    # Inside a thread: a generator of our own rather than the global seed.
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return model.double()


def single_worker(
    steps: int, optimizer: Callable[..., torch.optim.Optimizer], plan: Plan = PLAN
) -> list[torch.Tensor]:
    """The same training of `mlp` with one optimizer a worker and `Round.mix` between steps."""
    models = [mlp() for _ in range(plan.num_workers)]
    optimizers = [optimizer(model.parameters(), lr=0.1) for model in models]
    generators = [torch.Generator().manual_seed(rank) for rank in range(plan.num_workers)]
    for k in range(steps):
        for model, chosen, generator in zip(models, optimizers, generators, strict=True):
            plain_step(model, chosen, torch.randn(16, 4, generator=generator).double())
        mixed = plan.round(k).mix(np.stack([flat(model).numpy() for model in models]))
        for model, row in zip(models, mixed, strict=True):
            nn.utils.vector_to_parameters(torch.from_numpy(row), model.parameters())
    return [flat(model) for model in models]


def double_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    plain_step(model, optimizer, batch.double())


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
        assert {b.data.dtype for b in gossip.buckets} == {torch.float32, torch.bfloat16}
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


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_a_scaler_skips_still_takes_part_in_its_round(overlap) -> None:
    scalers: dict[int, torch.amp.GradScaler] = {}

    def step(model, optimizer, batch) -> None:
        key = threading.get_ident()
        scaler = scalers.setdefault(key, torch.amp.GradScaler("cpu", init_scale=256.0))
        optimizer.zero_grad()
        loss = model(batch.double()).square().mean()
        scaler.scale(loss).backward()
        if batch[0, 0] > 0.5:  # overflow, on some workers only
            model[0].weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()

    trained = train(mlp, step, steps=6, overlap=overlap)
    assert len({scaler.get_scale() for scaler in scalers.values()}) > 1
    assert {gossip.iteration for _, gossip in trained} == {6}
    assert all(torch.isfinite(flat(model)).all() for model, _ in trained)


def test_without_overflow_a_scaler_changes_nothing() -> None:
    def step(model, optimizer, batch) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer.zero_grad()
        scaler.scale(model(batch.double()).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    trained = train(mlp, step, steps=3)
    for (model, _), reference in zip(trained, single_worker(3, torch.optim.SGD), strict=True):
        assert torch.allclose(flat(model), reference, rtol=0, atol=1e-10)


def test_a_step_left_out_by_hand_takes_part_by_skip_step() -> None:
    def work(transport: MemoryTransport) -> int:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Gossip(model, optimizer, PLAN, transport=transport, deadline=30) as gossip:
            for k in range(3):
                if transport.rank == k:
                    gossip.skip_step()
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
            model, optimizer, PLAN, transport=transport, deadline=30, overlap=overlap
        ) as gossip:
            generator = torch.Generator().manual_seed(transport.rank)
            for _ in range(3):
                batch = torch.randn(16, 4, generator=generator, dtype=torch.float64)
                plain_step(model, optimizer, batch)
            own = [t.clone() for t in (*model.parameters(), *model.buffers())]
            exported = gossip.averaged_model()
            distance = gossip.consensus_distance()
            with gossip.averaged() as average:
                assert average is model
                assert torch.equal(flat(model), flat(exported))
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


# -- who waits for whom ----------------------------------------------------------------------------


class Fixed:
    """Rounds from a list, then empty ones, as any plan-like value may give them."""

    seed = 0
    digest = "fixed"
    wire = Float()
    levels = ()

    def __init__(self, num_workers: int, *matchings_of_rounds: tuple) -> None:
        self.num_workers = num_workers
        self.topology = families.complete(num_workers)
        self._matchings = matchings_of_rounds

    def rounds(self, start: int = 0, stop: int | None = None) -> Iterator[Round]:
        assert stop is None
        for k in range(start, 10**9):
            chosen = self._matchings[k] if k < len(self._matchings) else ()
            indices = tuple(range(len(chosen)))
            yield Round(matchings=chosen, indices=indices, mixing="pairwise", weight=0.5)


class Counting(MemoryTransport):
    """Counts calls."""

    calls = 0

    def post(self, messages):
        self.calls += 1
        return super().post(messages)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_worker_without_a_partner_makes_no_call(overlap) -> None:
    plan = Fixed(3, (), (((0, 1),),), (), ())

    def work(transport: MemoryTransport) -> list[int]:
        counting = Counting(transport.network, transport.rank)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        Gossip(model, optimizer, plan, transport=counting, overlap=overlap, deadline=30)
        seen = []
        for _ in range(4):
            before = counting.calls
            double_step(model, optimizer, torch.ones(2, 4))
            seen.append(counting.calls - before)
        return seen

    first, second, idle = run_threads(3, work)
    assert idle == [0, 0, 0, 0]
    assert sum(first) == sum(second) == 2  # a header and one bucket


def test_workers_out_of_reach_of_a_slow_one_run_ahead() -> None:
    # 0-1 meet in every round and 2-3 in every round; nobody else ever meets.
    plan = Fixed(4, *([(((0, 1), (2, 3)),)] * 30))
    released = threading.Event()
    finished: dict[int, float] = {}

    def work(transport: MemoryTransport) -> None:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gossip = Gossip(model, optimizer, plan, transport=transport, deadline=30)
        for k in range(30):
            if transport.rank == 0 and k == 3:
                assert released.wait(20), "the others did not run ahead"
            double_step(model, optimizer, torch.ones(2, 4))
        finished[transport.rank] = time.monotonic()
        if {2, 3} <= finished.keys():
            released.set()
        assert gossip.iteration == 30

    run_threads(4, work)
    assert max(finished[2], finished[3]) < min(finished[0], finished[1])


def test_overlap_hides_the_exchange_behind_the_gradient() -> None:
    plan = Fixed(2, *([(((0, 1),),)] * 10))

    def work(transport: MemoryTransport) -> tuple[float, float]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        slow = SlowLinks(transport, mbps=0.4)  # 424 bytes: about 8 ms
        with Gossip(model, optimizer, plan, transport=slow, overlap=True, deadline=30) as gossip:
            double_step(model, optimizer, torch.ones(2, 4))
            started = gossip.exchange_seconds
            blocked = 0.0
            for _ in range(5):
                time.sleep(0.05)  # the gradient
                before = time.perf_counter()
                gossip.settle()
                blocked += time.perf_counter() - before
                double_step(model, optimizer, torch.ones(2, 4))
            return blocked, gossip.exchange_seconds - started

    for blocked, exchanging in run_threads(2, work):
        assert exchanging > 0.03
        assert blocked < exchanging


def test_spans_tell_computing_waiting_and_exchanging_apart() -> None:
    plan = Fixed(2, *([(((0, 1),),)] * 3))

    def work(transport: MemoryTransport):
        spans = []
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        Gossip(model, optimizer, plan, transport=transport, deadline=30, on_span=spans.append)
        for _ in range(3):
            time.sleep(0.02 * transport.rank)
            double_step(model, optimizer, torch.ones(2, 4))
        return spans

    quick, slow = run_threads(2, work)
    assert [(s.iteration, s.kind) for s in quick] == [
        (k, kind) for k in range(3) for kind in ("compute", "wait", "exchange")
    ]
    assert all(span.start <= span.end for span in (*quick, *slow))
    waited = [sum(s.end - s.start for s in spans if s.kind == "wait") for spans in (quick, slow)]
    assert waited[0] > 0.03 > waited[1]


# -- refusals --------------------------------------------------------------------------------------


def refused(num_workers: int = 8, sentence: str = "", plan: Any = PLAN, **options: Any) -> None:
    def work(transport: MemoryTransport) -> None:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        chosen = plan(transport.rank) if callable(plan) else plan
        with pytest.raises((InputError, ExchangeError), match=sentence):
            Gossip(model, optimizer, chosen, transport=transport, deadline=10, **options)

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
            Gossip(model, optimizer, PLAN, transport=transport, deadline=10)

    run_threads(8, work)


def test_a_silent_partner_is_named_within_the_deadline() -> None:
    plan = Fixed(2, (((0, 1),),))

    def work(transport: MemoryTransport) -> None:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        Gossip(model, optimizer, plan, transport=transport, deadline=0.5)
        if transport.rank == 0:
            with pytest.raises(ExchangeError, match=r"rank 1 \(host .*did not answer within 0.5 s"):
                double_step(model, optimizer, torch.ones(2, 4))

    run_threads(2, work)


def test_after_detach_the_model_trains_alone() -> None:
    trained = train(mlp, double_step, steps=2)
    model, gossip = trained[0]
    optimizer = gossip.optimizer
    gossip.detach()
    before = flat(model)
    double_step(model, optimizer, torch.ones(2, 4))
    assert gossip.iteration == 2
    assert not torch.equal(flat(model), before)


def test_overlap_hides_the_exchange_behind_a_closure_too() -> None:
    """A closure computes the gradient: the exchange must not be waited for before it ran."""
    plan = Fixed(2, *([(((0, 1),),)] * 4))
    gradients = {rank: threading.Event() for rank in range(2)}

    class Late(MemoryTransport):
        """Delivers the other's values only when this worker's gradient is there."""

        def post(self, messages):
            pending = super().post(messages)
            if not armed.is_set():
                return pending
            wait = pending.wait

            def late(timeout: float) -> None:
                assert gradients[self.rank].wait(20), "waited for the exchange before the closure"
                wait(timeout)

            pending.wait = late
            return pending

    armed = threading.Event()
    ready = threading.Barrier(2)

    def work(transport: MemoryTransport) -> int:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        late = Late(transport.network, transport.rank)
        with Gossip(model, optimizer, plan, transport=late, overlap=True, deadline=30) as gossip:
            ready.wait(20)
            armed.set()

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(torch.ones(2, 4).double()).square().mean()
                loss.backward()
                gradients[transport.rank].set()
                return loss

            for _ in range(4):
                gradients[transport.rank].clear()
                optimizer.step(closure)
            gradients[transport.rank].set()
            return gossip.iteration

    assert run_threads(2, work) == [4, 4]


# -- exact averages --------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_local_sgd_gives_everybody_the_same_model_when_it_averages(overlap) -> None:
    plan = matcha.plan(families.ring(cases.NUM_WORKERS), 0.5, "local")
    period = next(k for k in range(99) if plan.round(k)) + 1
    for steps, same in ((period, not overlap), (period + 1, False)):
        found = train(lambda: nn.Linear(4, 2), plan=plan, steps=steps, overlap=overlap)
        weights = [model.weight.detach() for model, _ in found]
        assert all(torch.equal(w, weights[0]) for w in weights) is same
    assert found[0][1].exchange.bytes_sent >= 2 * 7 / 8 * 10 * 4


def test_silence_sends_nothing() -> None:
    plan = matcha.plan(families.ring(cases.NUM_WORKERS), 0.5, "silent")
    found = train(lambda: nn.Linear(4, 2), plan=plan)
    assert all(gossip.exchange.bytes_sent == 0 for _, gossip in found)
