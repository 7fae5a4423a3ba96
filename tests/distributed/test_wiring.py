"""Gossip over coded wires and with momentum that knows about meetings, against the definitions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.distributed import wire_cases
from tests.simulation.tasks import digits, er8, rows

from matcha.distributed import Gossip, run_threads
from matcha.errors import InputError
from matcha.simulation import SGD, Execution, Settings, Simulation
from matcha.tasks.rates import Constant
from matcha.wires import parse_wire


@pytest.mark.parametrize("wire", wire_cases.WIRES)
@pytest.mark.parametrize(("strategy", "mixing"), wire_cases.STRATEGIES)
def test_gossip_in_memory_is_the_definition(strategy, mixing, wire) -> None:
    plan = wire_cases.wired(strategy, mixing, wire, 4)
    for rule in ("eq2", "footnote"):
        results = run_threads(4, lambda t, rule=rule: wire_cases.train(t, plan, rule))
        wire_cases.check(np.stack(results), plan, rule)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gloo", "mpi"])
def test_gossip_between_processes_is_the_definition(kind, workers, tmp_path) -> None:
    if kind == "mpi":
        pytest.importorskip("mpi4py")
        wire_cases.run_mpi(tmp_path)
    else:
        workers.run("wire_cases.py", "gloo", str(tmp_path), num_workers=wire_cases.PROCESSES)
    wire_cases.check_folder(tmp_path)


@pytest.mark.parametrize("momentum", ["quasi-global", "outer", "tracking", "auto"])
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


@pytest.mark.parametrize("wire", ["modulo:3", "lowrank:2"])
@pytest.mark.parametrize("momentum", ["quasi-global", "outer", "tracking"])
def test_resuming_is_exact(wire, momentum, tmp_path: Path) -> None:
    plan = wire_cases.wired("greedy", "pairwise", wire, 4)

    def work(transport) -> bool:
        ends = []
        for name in ("whole", "halves"):
            model, optimizer = wire_cases.worker(transport.rank)
            options = {"transport": transport, "momentum": momentum, "bucket_mb": 0.002}
            gossip = Gossip(model, optimizer, plan, **options)
            for k in range(12):
                if name == "halves" and k == 6:
                    gossip.save(tmp_path / f"{wire[0]}{momentum}")
                    gossip.detach()
                    model, optimizer = wire_cases.worker(transport.rank)
                    gossip = Gossip(model, optimizer, plan, **options)
                    gossip.load(tmp_path / f"{wire[0]}{momentum}")
                wire_cases.step(model, optimizer)
            gossip.detach()
            ends.append(model.flat())
        return bool(np.array_equal(*ends))

    assert all(run_threads(4, work))


def test_quasi_global_says_which_optimizers_it_knows() -> None:
    plan = wire_cases.wired("greedy", "pairwise", "modulo:3", 4)

    def work(transport) -> str:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.RMSprop(model.parameters())
        with pytest.raises(InputError) as caught:
            Gossip(model, optimizer, plan, transport=transport, momentum="quasi-global")
        return str(caught.value)

    assert "needs SGD with momentum, or Adam" in run_threads(4, work)[0]


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
