from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.simulation import textbook
from tests.simulation.tasks import digits, er8, rows

from matcha.plans import Plan
from matcha.simulation import SGD, Execution, Settings, Simulation
from matcha.training.momentum import MOMENTA
from matcha.training.rates import Constant
from matcha.wires import parse_wire

EXACT = Execution(precision="float64")
WIRES = ("bfloat16", "modulo:8", "modulo:4", "modulo:3", "modulo:2", "lowrank:2")


def settings(**choices) -> Settings:
    return Settings(
        **{
            "epochs": 2,
            "schedule": Constant(base=0.05),
            "optimizer": SGD(momentum=0.9),
            "execution": EXACT,
            "evaluate_every": 2,
        }
        | choices
    )


def over(wire: str, strategy: str = "greedy", budget: float = 0.3) -> Plan:
    return replace(er8(strategy, budget), wire=parse_wire(wire))


@pytest.mark.parametrize(("strategy", "mixing"), [("matcha", "laplacian"), ("greedy", "pairwise")])
@pytest.mark.parametrize("wire", WIRES)
def test_training_over_a_wire_is_the_definition(wire, strategy, mixing) -> None:
    task = digits(name="logistic", steps=4)
    plan = replace(er8(strategy), wire=parse_wire(wire))
    assert plan.mixing == mixing
    for overlap in (False, True):
        simulation = Simulation(task, plan, settings(overlap=overlap))
        list(simulation)
        expected = textbook.train(
            task, plan, epochs=2, rate=0.05, overlap=overlap, momentum=0.9, wire=wire
        )
        np.testing.assert_allclose(rows(simulation.engine), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("wire", ["modulo:3", "lowrank:2"])
@pytest.mark.parametrize("momentum", [name for name in MOMENTA if name != "auto"])
def test_resuming_over_a_wire_is_exact(tmp_path, wire, momentum) -> None:
    task, plan = digits(name="logistic", steps=4), over(wire)
    how = settings(momentum=momentum, epochs=4)
    whole = Simulation(task, plan, how)
    list(whole)
    first = Simulation(task, plan, how)
    epochs = iter(first)
    next(epochs), next(epochs)
    first.save(tmp_path / "state.pt")
    again = Simulation(task, plan, how)
    again.load(tmp_path / "state.pt")
    list(again)
    assert torch.equal(again.engine.workers.parameters, whole.engine.workers.parameters)


def test_records_count_the_bytes_of_their_wire() -> None:
    task, plan = digits(name="logistic", steps=4), er8("greedy", 0.3)
    sent = {
        wire: list(Simulation(task, over(wire), settings()))[-1].megabytes_sent
        for wire in ("float32", "bfloat16", "modulo:8")
    }
    meetings = sum(2 * len(plan.round(k).links) for k in range(8)) / 8
    assert sent["float32"] == pytest.approx(meetings * 650 * 4 / 1e6)
    assert sent["bfloat16"] == sent["float32"] / 2
    assert sent["modulo:8"] == pytest.approx(meetings * 4 * 262 / 1e6)  # 640 weights and 10 biases


def test_an_engine_serves_one_wire_after_another() -> None:
    task = digits(name="logistic", steps=4)
    fresh = Simulation(task, over("modulo:4"), settings(momentum="outer"))
    engine = Simulation(task, over("lowrank:2"), settings()).engine
    list(Simulation(task, over("float32"), settings(momentum="tracking"), engine=engine))
    used = Simulation(task, over("modulo:4"), settings(momentum="outer"), engine=engine)
    list(fresh), list(used)
    assert torch.equal(fresh.engine.workers.parameters, used.engine.workers.parameters)


def test_a_value_that_is_not_finite_ends_a_run_loudly() -> None:
    task = digits(name="logistic", steps=4)
    simulation = Simulation(task, over("modulo:3"), settings())
    simulation.engine.workers.parameters[3, 5] = float("nan")
    (record,) = list(simulation)
    assert simulation.progress.diverged
    assert not np.isfinite(record.worker_loss)
    others = [k for k in range(8) if k != 3]
    assert torch.isfinite(simulation.engine.workers.parameters[others]).all()


@pytest.mark.parametrize("wire", ["modulo:8", "modulo:3"])
def test_quasi_global_momentum_does_not_run_away_over_a_wire(wire) -> None:
    task = digits(steps=11, batch_size=8)
    optimizer = SGD(momentum=0.9, nesterov=True, weight_decay=5e-4)
    apart = {}
    for name in ("float32", wire):
        # Twice this rate is past what the task can be trained with at all: everything is chance.
        how = settings(epochs=14, schedule=Constant(base=0.2), optimizer=optimizer)
        how = replace(how, momentum="quasi-global", execution=Execution(), evaluate_every=14)
        apart[name] = list(Simulation(task, over(name, budget=0.2), how))[-1].consensus_distance
    assert apart[wire] < 20 * apart["float32"] + 0.1
