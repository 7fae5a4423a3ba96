"""Momentum that knows about meetings, on real workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.distributed import wire_cases
from tests.distributed.perceptrons import flat, mlp
from tests.distributed.test_optimizer_hooks import ALWAYS, backward, batch
from tests.simulation.tasks import digits, er8, rows
from torch import nn

import matcha
from matcha.distributed import Gossip
from matcha.distributed.train import Training
from matcha.errors import InputError
from matcha.simulation import SGD, Execution, Settings, Simulation
from matcha.strategies import DiLoCo, GASLoC, Local, NoLoCo, SparseLoCo
from matcha.testing import MemoryTransport, run_threads
from matcha.training.momentum import MOMENTA, Momentum, make_rule
from matcha.training.optimizers import Adam, Muon, adamw
from matcha.training.rates import Constant
from matcha.wires import parse_wire
from matcha.zoo.tensors import TensorTask


@pytest.mark.parametrize("momentum", [name for name in MOMENTA if name != "local"])
@pytest.mark.parametrize("wire", ["float32", "modulo:4"])
def test_momentum_on_real_workers_is_the_simulators(momentum, wire) -> None:
    task, plan = digits(name="logistic", steps=5), er8("greedy", 0.3)
    plan = replace(plan, wire=parse_wire(wire))
    settings = Settings(
        epochs=1,
        schedule=Constant(base=0.05),
        optimizer=SGD(momentum=0.9, nesterov=True, weight_decay=1e-3),
        momentum=momentum,
        execution=Execution(precision="float64"),
    )
    simulation = Simulation(task, plan, settings)
    list(simulation)

    def work(transport) -> np.ndarray:
        own = digits(name="logistic", steps=5)
        own.to(torch.device("cpu"), torch.float64)
        model = own.model().double()
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3
        )
        with Gossip(model, optimizer, plan, transport=transport, momentum=momentum):
            for step in range(own.steps_per_epoch):
                tables = {k: torch.from_numpy(t[step]) for k, t in own.tables(0).items()}
                x, y = own.batch(tables)
                optimizer.zero_grad()
                own.loss(model, x[transport.rank], y[transport.rank], ())[0].backward()
                optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()

    found = np.stack(run_threads(8, work))
    np.testing.assert_allclose(found, rows(simulation.engine), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("strategy", "wire"),
    [
        (DiLoCo(period=2), "float32"),
        (DiLoCo(period=2), "modulo:4"),
        (NoLoCo(period=2), "modulo:3"),
        (GASLoC(period=2), "modulo:4"),
        (GASLoC(period=2, pairs=True), "float32"),
        (SparseLoCo(period=2, wire="topk:16"), "float32"),
    ],
    ids=lambda part: part if isinstance(part, str) else part.name,
)
def test_low_communication_on_real_workers_is_the_simulators(strategy, wire) -> None:
    task = digits(name="logistic", steps=6)
    plan = matcha.plan(matcha.families.complete(8), 1.0, strategy, wire=wire)
    settings = Settings(
        epochs=1,
        schedule=Constant(base=0.05),
        optimizer=adamw(),
        execution=Execution(precision="float64"),
    )
    simulation = Simulation(task, plan, settings)
    (record,) = simulation

    def work(transport) -> tuple[np.ndarray, int]:
        own = digits(name="logistic", steps=6)
        own.to(torch.device("cpu"), torch.float64)
        model = own.model().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        with Gossip(model, optimizer, plan, transport=transport) as gossip:
            for step in range(own.steps_per_epoch):
                tables = {k: torch.from_numpy(t[step]) for k, t in own.tables(0).items()}
                x, y = own.batch(tables)
                optimizer.zero_grad()
                own.loss(model, x[transport.rank], y[transport.rank], ())[0].backward()
                optimizer.step()
            return flat(model).numpy(), gossip.state.exchange.bytes_sent

    values, sent = zip(*run_threads(8, work), strict=True)
    np.testing.assert_allclose(np.stack(values), rows(simulation.engine), rtol=0, atol=1e-10)
    if strategy.name == "sparseloco":  # whose messages do not depend on the precision
        assert set(sent) == {round(record.megabytes_sent * 1e6)}


@pytest.mark.parametrize("wire", ["float32", "modulo:4"])
def test_adams_moments_are_shared_as_in_the_simulator(wire) -> None:
    task, plan = digits(name="logistic", steps=5), er8("greedy", 0.3)
    plan = replace(plan, wire=parse_wire(wire))
    settings = Settings(
        epochs=1,
        schedule=Constant(base=0.05),
        optimizer=adamw(weight_decay=0.1),
        momentum="shared",
        execution=Execution(precision="float64"),
    )
    simulation = Simulation(task, plan, settings)
    list(simulation)

    def work(transport) -> tuple[np.ndarray, np.ndarray]:
        own = digits(name="logistic", steps=5)
        own.to(torch.device("cpu"), torch.float64)
        model = own.model().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
        with Gossip(model, optimizer, plan, transport=transport, momentum="shared"):
            for step in range(own.steps_per_epoch):
                tables = {k: torch.from_numpy(t[step]) for k, t in own.tables(0).items()}
                x, y = own.batch(tables)
                optimizer.zero_grad()
                own.loss(model, x[transport.rank], y[transport.rank], ())[0].backward()
                optimizer.step()
        moments = [optimizer.state[p]["exp_avg"].flatten() for p in model.parameters()]
        return flat(model).numpy(), torch.cat(moments).numpy()

    values, moments = (np.stack(found) for found in zip(*run_threads(8, work), strict=True))
    np.testing.assert_allclose(values, rows(simulation.engine), rtol=0, atol=1e-10)
    firsts = simulation.engine.memory["first"]
    named = simulation.engine.workers.layout.views(firsts)
    expected = np.concatenate([view.reshape(8, -1).numpy() for _, view in named], axis=1)
    np.testing.assert_allclose(moments, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("period", "kind"), [(8, "outer"), (4, "local")])
def test_auto_with_adamw_takes_outer_steps_where_rounds_are_rare(period, kind) -> None:
    task = digits(name="logistic", steps=16)
    plan = matcha.plan(matcha.families.complete(8), strategy=Local(period=period))
    settings = Settings(
        epochs=1,
        schedule=Constant(base=0.05),
        optimizer=adamw(),
        momentum="auto",
        execution=Execution(precision="float64"),
    )
    simulation = Simulation(task, plan, settings)
    list(simulation)
    assert simulation.momentum.kind == kind

    def work(transport) -> np.ndarray:
        worker = Training(digits(name="logistic", steps=16), plan, settings, transport)
        list(worker)
        return flat(worker.model).numpy()

    found = np.stack(run_threads(8, work))
    np.testing.assert_allclose(found, rows(simulation.engine), rtol=0, atol=1e-10)


@pytest.mark.parametrize("momentum", ["auto", "shared"])
@pytest.mark.parametrize("wire", ["float32", "modulo:4"])
def test_muon_on_real_workers_is_the_simulators(momentum, wire) -> None:
    """Two optimizers, of which each steps a part of the model, as in the simulator's rows."""
    plan = replace(er8("greedy", 0.3), wire=parse_wire(wire))
    settings = Settings(
        epochs=1,
        schedule=Constant(base=0.02),
        optimizer=Muon(weight_decay=0.1),
        momentum=momentum,
        execution=Execution(precision="float64"),
    )

    def task() -> TensorTask:
        draw = torch.Generator().manual_seed(0)
        x, y = torch.randn(160, 6, generator=draw), torch.randint(3, (160,), generator=draw)
        layers = lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))  # noqa: E731
        return TensorTask(layers, x, y, num_workers=8, batch_size=4)

    simulation = Simulation(task(), plan, settings)
    list(simulation)

    def work(transport) -> np.ndarray:
        worker = Training(task(), plan, settings, transport)
        list(worker)
        return flat(worker.model).numpy()

    found = np.stack(run_threads(8, work))
    np.testing.assert_allclose(found, rows(simulation.engine), rtol=0, atol=1e-10)


def test_adam_under_allreduce_is_said_not_to_be_ddp(caplog) -> None:
    plan = wire_cases.wired("allreduce", "average", "float32", 4)

    def work(transport) -> None:
        model = torch.nn.Linear(2, 2)
        for kind in (torch.optim.SGD, torch.optim.AdamW):
            with Gossip(model, kind(model.parameters(), lr=0.1), plan, transport=transport):
                pass

    run_threads(4, work)
    said = [r for r in caplog.records if "compare with DDP itself" in r.getMessage()]
    assert len(said) == 4


def test_quasi_global_says_which_optimizers_it_knows() -> None:
    plan = wire_cases.wired("greedy", "pairwise", "modulo:3", 4)

    def work(transport) -> str:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.RMSprop(model.parameters())
        with pytest.raises(InputError) as caught:
            Gossip(model, optimizer, plan, transport=transport, momentum="quasi-global")
        return str(caught.value)

    assert "needs SGD with momentum, or Adam" in run_threads(4, work)[0]


def test_muons_momentum_is_shared_beside_adams() -> None:
    """Weight matrices by Muon, the rest by AdamW: what both remember ends at the mean."""
    plan = matcha.plan(matcha.families.complete(4), 1.0, "local")

    def work(transport) -> list[torch.Tensor]:
        model = mlp()
        matrices = [p for p in model.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if p.dim() != 2]
        optimizers = [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)]
        options: dict[str, Any] = {"transport": transport, "timeout": 30}
        with pytest.raises(InputError, match="quasi-global momentum needs SGD"):
            Gossip(model, optimizers, plan, momentum="quasi-global", **options)
        before = [p.detach().clone() for p in matrices]
        with Gossip(model, optimizers, plan, momentum="shared", **options):
            backward(model, batch(torch.Generator().manual_seed(transport.rank)))
            for optimizer in optimizers:
                optimizer.step()
        moved = max((p.detach() - b).abs().max() for p, b in zip(matrices, before, strict=True))
        assert moved > 1e-4
        buffers = [optimizers[0].state[p]["momentum_buffer"] for p in matrices]
        return [*buffers, *(optimizers[1].state[p]["exp_avg"] for p in others)]

    first, *rest = run_threads(4, work)
    for other in rest:
        for a, b in zip(first, other, strict=True):
            torch.testing.assert_close(a, b)


def test_adamw_follows_meetings() -> None:
    plan = wire_cases.wired("greedy", "pairwise", "float32", 4)

    def work(transport) -> list[np.ndarray]:
        ends = []
        for momentum in ("local", "quasi-global"):
            model, _ = wire_cases.worker(transport.rank)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            with Gossip(model, optimizer, plan, transport=transport, momentum=momentum):
                for _ in range(10):
                    wire_cases.step(model, optimizer)
            ends.append(model.flat())
        return ends

    local, followed = (np.stack(ends) for ends in zip(*run_threads(4, work), strict=True))
    assert np.isfinite(followed).all()
    assert np.abs(followed - local).max() > 1e-6


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.LBFGS])
def test_the_outer_step_goes_with_any_optimizer(kind) -> None:
    """v ← βv + α(x̄ − φ), φ ← φ + v, x ← φ: it looks at parameters alone."""

    def work(transport: MemoryTransport) -> torch.Tensor:
        model = mlp()
        optimizer = kind(model.parameters(), lr=0.01)
        options: dict[str, Any] = {"transport": transport, "timeout": 30, "momentum": "outer"}
        with Gossip(model, optimizer, ALWAYS, **options):
            generator = torch.Generator().manual_seed(transport.rank)
            for _ in range(4):
                inputs = batch(generator)
                optimizer.step(lambda: backward(model, inputs))  # noqa: B023
        return flat(model)

    models = [mlp(), mlp()]
    optimizers = [kind(model.parameters(), lr=0.01) for model in models]
    generators = [torch.Generator().manual_seed(rank) for rank in range(2)]
    anchors = [flat(model) for model in models]
    velocities = [torch.zeros_like(anchor) for anchor in anchors]
    for _ in range(4):
        for model, optimizer, generator in zip(models, optimizers, generators, strict=True):
            inputs = batch(generator)
            optimizer.step(lambda: backward(model, inputs))  # noqa: B023
        mean = (flat(models[0]) + flat(models[1])) / 2
        for k, model in enumerate(models):
            velocities[k] = 0.5 * velocities[k] + 0.7 * (mean - anchors[k])
            anchors[k] = anchors[k] + velocities[k]
            nn.utils.vector_to_parameters(anchors[k].clone(), model.parameters())
            if kind is torch.optim.LBFGS:
                optimizers[k].state.clear()
    for found, expected in zip(run_threads(2, work), models, strict=True):
        assert torch.allclose(found, flat(expected), rtol=0, atol=1e-12)


def test_the_outer_step_goes_with_updates_written_by_hand() -> None:
    def work(transport: MemoryTransport) -> torch.Tensor:
        model = mlp()
        start = flat(model)
        options: dict[str, Any] = {"transport": transport, "timeout": 30, "momentum": "outer"}
        with Gossip(model, None, ALWAYS, **options) as gossip:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0)
            gossip.step()
        return flat(model) - start

    for moved in run_threads(2, work):
        assert torch.allclose(moved, torch.full_like(moved, 0.7))


@pytest.mark.parametrize(
    "momentum", ["tracking", "quasi-global", "outer", "exact-diffusion", "momentum-tracking"]
)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_complex_parameters_are_pairs_of_real_ones(momentum, kind) -> None:
    """Tracking once dropped the imaginary parts of gradients, quasi-global crashed."""
    start = torch.randn(5, dtype=torch.complex128, generator=torch.Generator().manual_seed(1))
    targets = [torch.view_as_real(t.resolve_conj()) for t in (start + 1j, start.conj() - 2)]

    def train(transport: MemoryTransport, is_complex: bool) -> torch.Tensor:
        own = start.clone() if is_complex else torch.view_as_real(start).clone()
        model = nn.ParameterList([own])
        extra = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        optimizer = kind(model.parameters(), lr=0.05, **extra)
        options: dict[str, Any] = {"transport": transport, "timeout": 30, "momentum": momentum}
        with Gossip(model, optimizer, ALWAYS, **options):
            for _ in range(5):
                optimizer.zero_grad()
                values = torch.view_as_real(model[0]) if is_complex else model[0]
                ((values - targets[transport.rank]) ** 2).sum().backward()
                optimizer.step()
        found = model[0].detach()
        return torch.view_as_real(found) if is_complex else found

    as_complex = run_threads(2, lambda transport: train(transport, True))
    as_real = run_threads(2, lambda transport: train(transport, False))
    for one, other in zip(as_complex, as_real, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_small_parameters_share_a_rule_and_nothing_changes(kind, monkeypatch) -> None:
    """Nor do groups of rates of their own, nor, with Adam, a parameter without a gradient yet.

    (SGD's rule fills its memory slowly, and parameters of one rule begin that together.)
    """

    def work(transport: MemoryTransport) -> tuple[torch.Tensor, list[str]]:
        model = mlp()
        model.append(nn.Linear(1, 1).double())
        with torch.no_grad():
            model[-1].weight.fill_(1.0)
            model[-1].bias.fill_(0.0)
        groups = [
            {"params": [p for p in model.parameters() if p.ndim == ndim], "lr": rate}
            for ndim, rate in ((1, 0.05), (2, 0.01))
        ]
        extra = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        optimizer = kind(groups, **extra)
        late = 0 if kind is torch.optim.SGD else 2
        options: dict[str, Any] = {"transport": transport, "timeout": 30}
        with Gossip(model, optimizer, ALWAYS, momentum="quasi-global", **options) as gossip:
            generator = torch.Generator().manual_seed(transport.rank)
            for k in range(6):
                optimizer.zero_grad()
                model[: -1 if k < late else None](batch(generator)).square().mean().backward()
                optimizer.step()
            return flat(model), sorted(gossip.state.momentum.state())

    together = run_threads(2, work)
    monkeypatch.setattr("matcha.distributed.exchange.momentum._SMALL", -1)
    for (one, names), (other, same) in zip(together, run_threads(2, work), strict=True):
        assert names == same
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("optimizer", [SGD(momentum=0.9), Adam()])
def test_a_silent_round_leaves_what_a_round_that_moves_nothing_leaves(optimizer) -> None:
    generator = torch.Generator().manual_seed(0)
    spec = Momentum(kind="quasi-global", follow=0.5, pause=4.0)
    x = torch.randn(700, generator=generator, dtype=torch.float64)
    start = [optimizer.state(x) for _ in range(2)]
    rules = [make_rule(spec, optimizer, x) for _ in start]
    values = [x.clone(), x.clone()]
    for _ in range(3):
        gradient = torch.randn(700, generator=generator, dtype=torch.float64)
        for k, (rule, memory) in enumerate(zip(rules, start, strict=True)):
            rule.adjust_gradient(gradient.clone())
            rule.before_step(values[k], memory)
            direction = gradient.clone()
            optimizer.direct(values[k], direction, memory)
            values[k].add_(direction, alpha=-0.1)
            if k:
                rule.after_silent_round(values[k], memory, 0.1)
            else:
                rule.after_step(values[k], 0.1)
                rule.after_round(values[k], memory, 0.1, None)
    assert torch.equal(*values)
    for key, value in start[0].items():
        assert torch.equal(value, start[1][key])


@pytest.mark.parametrize("by_two", [False, True])
@pytest.mark.parametrize("momentum", [name for name in MOMENTA if name != "auto"])
def test_training_goes_on_from_a_checkpoint_between_two_optimizers_steps(
    momentum, by_two, tmp_path
) -> None:
    def train(transport: MemoryTransport, stops: bool) -> torch.Tensor:
        def make() -> tuple[nn.Module, list[torch.optim.Optimizer], Gossip]:
            model = mlp()
            parts = [list(model.parameters())]
            if by_two:
                parts = [[p for p in model.parameters() if p.ndim == ndim] for ndim in (2, 1)]
            optimizers: list[torch.optim.Optimizer] = [
                torch.optim.SGD(part, lr=0.05, momentum=0.9) for part in parts
            ]
            options: dict[str, Any] = {"transport": transport, "timeout": 30}
            return (
                model,
                optimizers,
                Gossip(model, optimizers, ALWAYS, momentum=momentum, **options),
            )

        model, optimizers, gossip = make()
        generator = torch.Generator().manual_seed(transport.rank)
        for k in range(12):
            backward(model, batch(generator))
            optimizers[k % len(optimizers)].step()
            follows = momentum in ("quasi-global", "momentum-tracking", "shared")
            if k == 6 and stops and follows and by_two:
                with pytest.raises(InputError, match="between the steps of an iteration"):
                    gossip.save(tmp_path / momentum)
            elif k == 6 and stops:
                gossip.save(tmp_path / momentum)
                gossip.detach()
                model, optimizers, gossip = make()
                gossip.load(tmp_path / momentum)
        gossip.detach()
        return flat(model)

    whole = run_threads(2, lambda transport: train(transport, False))
    resumed = run_threads(2, lambda transport: train(transport, True))
    for one, other in zip(whole, resumed, strict=True):
        assert torch.equal(one, other)
