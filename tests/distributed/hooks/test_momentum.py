"""Momentum that knows about meetings, on real workers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.distributed import wire_cases
from tests.simulation.tasks import digits, er8, rows

from matcha.distributed import Gossip, run_threads
from matcha.errors import InputError
from matcha.simulation import SGD, Execution, Settings, Simulation
from matcha.training.rates import Constant
from matcha.wires import parse_wire


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
