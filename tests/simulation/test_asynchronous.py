from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.simulation.tasks import digits, er8, quadratic, rows

import matcha
from matcha.errors import InputError
from matcha.simulation import (
    SGD,
    Adam,
    AsynchronousSimulation,
    Constant,
    Delays,
    Execution,
    Settings,
    Simulation,
)
from matcha.wires import parse_wire

SLOW = (1.0,) * 7 + (0.25,)
SETTINGS = Settings(
    epochs=3,
    schedule=Constant(base=0.05),
    optimizer=SGD(momentum=0.9),
    delays=Delays(compute_time=1.0, link_time=0.25, speeds=SLOW),
    execution=Execution(precision="float64"),
    asynchronous=True,
)


def test_equal_speeds_and_quick_meetings_are_the_footnotes_rule():
    """A partner a round: everybody's exchange ends before its step does."""
    plan = er8("single", 0.5, mixing="pairwise")
    delays = replace(SETTINGS.delays, speeds=())
    ahead = AsynchronousSimulation(quadratic(), plan, replace(SETTINGS, delays=delays))
    in_step = Simulation(
        quadratic(), plan, replace(SETTINGS, delays=delays, asynchronous=False, overlap=True)
    )
    records = list(ahead), list(in_step)
    # The asynchronous ones have met for the next round already when a step has ended.
    mixed = plan.round(in_step.iteration)
    while ahead._taken:
        ahead._happen(ahead.agenda.next())
    expected = mixed.mix(rows(in_step.engine))
    np.testing.assert_allclose(rows(ahead.engine), expected, atol=1e-12)
    assert [r.iteration for r in records[0]] == [r.iteration for r in records[1]] == [4, 8, 12]
    for one, other in zip(*records, strict=True):
        assert one.train_loss == pytest.approx(other.train_loss, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_meetings_keep_the_sum_whatever_the_speeds(seed):
    """Without gradients the sum stays where it is, to 1e-12, and workers come together."""
    random = np.random.default_rng(seed)
    delays = Delays(
        compute_time=1.0,
        link_time=float(random.choice([0.0, 0.4, 3.0])),
        speeds=tuple(random.uniform(0.2, 2.0, 8)),
    )
    settings = replace(SETTINGS, epochs=24, delays=delays, schedule=Constant(base=1e-30))
    mixing = ("pairwise", "laplacian")[seed % 2]
    simulation = AsynchronousSimulation(quadratic(), er8("matcha", 0.5, mixing), settings)
    x = simulation.engine.workers.parameters
    x.copy_(torch.from_numpy(random.standard_normal(x.shape)))
    sum_before, spread = x.sum(0), float(x.std(0).mean())
    list(simulation)
    assert float((x.sum(0) - sum_before).abs().max()) < 1e-12
    assert float(x.std(0).mean()) < 0.5 * spread


def test_it_is_the_same_every_time():
    found = []
    for _ in range(2):
        simulation = AsynchronousSimulation(digits(), er8("greedy", 0.5), SETTINGS)
        records = list(simulation)
        found.append((records, rows(simulation.engine)))
    assert found[0][0] == found[1][0]
    assert np.array_equal(found[0][1], found[1][1])


def test_records_come_on_a_grid_of_time_until_as_much_is_learnt_as_in_step():
    records = list(AsynchronousSimulation(digits(), er8("greedy", 0.5), SETTINGS))
    assert [record.time for record in records] == pytest.approx([3.0, 6.0, 9.0, 12.0])
    assert records[-1].iteration >= 9 > records[-2].iteration
    assert records[0].epoch == pytest.approx(7.25 / 8, abs=0.1)
    assert records[-1].megabytes_sent > records[0].megabytes_sent > 0
    assert all(0 <= record.test_accuracy <= 1 for record in records)


def test_in_step_the_same_speeds_take_four_times_as_long():
    settings = replace(SETTINGS, asynchronous=False)
    *_, record = Simulation(digits(), er8("greedy", 1.0), settings)
    *_, even = Simulation(
        digits(), er8("greedy", 1.0), replace(settings, delays=replace(SETTINGS.delays, speeds=()))
    )
    assert record.train_loss == even.train_loss
    assert record.time >= 36.0 > even.time


@pytest.mark.parametrize("optimizer", [SGD(momentum=0.9), Adam()])
def test_a_run_goes_on_from_its_checkpoint(tmp_path, optimizer):
    plan, settings = er8("greedy", 0.5), replace(SETTINGS, optimizer=optimizer)
    whole = AsynchronousSimulation(digits(), plan, settings)
    expected = list(whole)
    begun = AsynchronousSimulation(digits(), plan, settings)
    records = [next(iter(begun))]
    begun.save(tmp_path / "checkpoint.pt")
    resumed = AsynchronousSimulation(digits(), plan, settings)
    resumed.load(tmp_path / "checkpoint.pt")
    assert records + list(resumed) == expected
    assert np.array_equal(rows(resumed.engine), rows(whole.engine))
    other = AsynchronousSimulation(digits(), plan, replace(settings, schedule=Constant(base=0.1)))
    with pytest.raises(InputError, match="another schedule"):
        other.load(tmp_path / "checkpoint.pt")


@pytest.mark.parametrize(
    ("plan", "change", "said"),
    [
        (matcha.plan(matcha.families.ring(8), 1.0, "allreduce"), {}, "choose a plan of pairs"),
        (replace(er8(), wire=parse_wire("modulo:4")), {}, "choose the wire float32"),
        (er8(), {"momentum": "quasi-global"}, "leave momentum at 'local'"),
    ],
)
def test_what_cannot_be_right_is_refused_in_a_sentence(plan, change, said):
    with pytest.raises(InputError, match=said):
        AsynchronousSimulation(quadratic(), plan, replace(SETTINGS, **change))
