from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.simulation.tasks import digits, er8, quadratic

import matcha
from matcha.distributed.checkpoint import SCHEMA
from matcha.errors import InputError
from matcha.records import has_diverged
from matcha.simulation import (
    SGD,
    Constant,
    Delays,
    Execution,
    Plateau,
    Settings,
    Simulation,
    StepDecay,
)
from matcha.strategies import staged_plan
from matcha.timing import LinkSeconds

SETTINGS = Settings(
    epochs=4,
    schedule=StepDecay(base=0.05, milestones=(2,)),
    optimizer=SGD(momentum=0.9, nesterov=True),
    delays=Delays(compute_time=0.5, link_time=0.1),
)


def test_one_record_an_epoch_with_the_simulated_clock():
    task, plan = digits(), er8()
    records = list(Simulation(task, plan, SETTINGS))
    assert [record.epoch for record in records] == [1, 2, 3, 4]
    assert [record.iteration for record in records] == [3, 6, 9, 12]
    units = [sum(plan.round_time(plan.round(k)) for k in range(r.iteration)) for r in records]
    assert [record.comm_units for record in records] == pytest.approx(units)
    for record, spent in zip(records, units, strict=True):
        assert record.time == pytest.approx(record.iteration * 0.5 + spent * 0.1)
    assert [record.learning_rate for record in records] == pytest.approx([0.05, 0.05, 0.005, 0.005])
    for record in records:
        assert 0 <= record.test_accuracy <= 1
        assert record.consensus_distance > 0
        assert record.worker is None


def test_plans_in_seconds_speak_for_themselves():
    topology = matcha.families.ring(4).with_link_times([0.25] * 4)
    plan = matcha.plan(topology, 1.0, "vanilla", timing=LinkSeconds(topology))
    settings = replace(SETTINGS, epochs=1)
    (record,) = Simulation(digits(4), plan, settings)
    assert record.comm_seconds == pytest.approx(3 * 2 * 0.25)
    assert record.time == pytest.approx(record.comm_seconds + 3 * 0.5)


def test_compute_time_is_measured_once_when_not_given():
    settings = replace(SETTINGS, delays=Delays(link_time=0.0))
    records = list(Simulation(digits(), er8(), settings))
    assert records[0].compute_seconds > 0
    assert len({record.compute_seconds for record in records}) == 1
    assert records[-1].time == pytest.approx(4 * records[0].compute_seconds)


def test_evaluation_when_due_and_at_the_end():
    settings = replace(SETTINGS, epochs=5, evaluate_every=2)
    records = list(Simulation(digits(), er8(), settings))
    assert [record.test_loss is not None for record in records] == [False, True, False, True, True]


def test_same_seed_same_records_other_seed_other_records():
    runs = [list(Simulation(digits(seed=seed), er8(), SETTINGS)) for seed in (0, 0, 1)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_the_callers_random_state_is_left_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    list(Simulation(digits(), er8(), replace(SETTINGS, epochs=1)))
    assert torch.equal(torch.get_rng_state(), before)


def test_training_learns():
    settings = replace(SETTINGS, epochs=8, schedule=Constant(base=0.1))
    records = list(Simulation(digits(batch_size=16, steps=8, num_test=200), er8(), settings))
    assert records[-1].train_loss < 0.3 * records[0].train_loss
    assert records[-1].test_accuracy > 0.85


def test_divergence_ends_the_run_with_its_record():
    settings = replace(SETTINGS, epochs=400, optimizer=SGD(), schedule=Constant(base=1e3))
    simulation = Simulation(quadratic(), er8(), settings)
    records = list(simulation)
    assert simulation.progress.diverged
    assert len(records) < 400
    assert has_diverged(records[-1].worker_loss)
    assert records[-1].train_loss is None


@pytest.mark.parametrize("stopped", [1, 3])
def test_resume_continues_to_the_same_bits(tmp_path, stopped):
    whole = Simulation(digits(), er8(), SETTINGS)
    expected = list(whole)
    first = Simulation(digits(), er8(), SETTINGS)
    for _, _record in zip(range(stopped), first, strict=False):
        pass
    first.save(tmp_path / "checkpoint.pt")
    second = Simulation(digits(), er8(), SETTINGS)
    second.load(tmp_path / "checkpoint.pt")
    assert list(second) == expected[stopped:]
    assert torch.equal(second.engine.workers.parameters, whole.engine.workers.parameters)
    assert torch.equal(second.engine.workers.buffers, whole.engine.workers.buffers)


def test_resume_may_ask_for_more_epochs(tmp_path):
    settings = replace(SETTINGS, schedule=Constant(base=0.05))
    first = Simulation(digits(), er8(), replace(settings, epochs=2))
    list(first)
    first.save(tmp_path / "checkpoint.pt")
    longer = Simulation(digits(), er8(), settings)
    longer.load(tmp_path / "checkpoint.pt")
    assert list(longer) == list(Simulation(digits(), er8(), settings))[2:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plan": er8("vanilla", 1.0)}, "another plan"),
        ({"task": digits(name="logistic")}, "another task"),
        ({"task": digits(batch_size=8, steps=3)}, "another batch size"),
        ({"task": digits(batch_size=4, steps=6)}, "another number of examples"),
        ({"task": digits(seed=1)}, "another seed and partition"),
        ({"task": digits(partition="shards")}, "another partition"),
        ({"task": digits(model="resnet8")}, "another model"),
        ({"settings": replace(SETTINGS, optimizer=SGD())}, "another optimizer"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path, change, message):
    Simulation(digits(), er8(), SETTINGS).save(tmp_path / "checkpoint.pt")
    other = {"task": digits(), "plan": er8(), "settings": SETTINGS} | change
    with pytest.raises(InputError, match=message):
        Simulation(*other.values()).load(tmp_path / "checkpoint.pt")


def test_a_checkpoint_has_a_name_of_its_own(tmp_path):
    Simulation(digits(), er8(), SETTINGS).save(tmp_path / "checkpoint.pt")
    document = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert document["schema"] == "matcha.simulation-checkpoint/1" != SCHEMA
    document["schema"] = SCHEMA  # as 0.1 called both
    torch.save(document, tmp_path / "old.pt")
    with pytest.raises(InputError, match=r"another version.* start the run again"):
        Simulation(digits(), er8(), SETTINGS).load(tmp_path / "old.pt")


def test_a_run_that_reached_its_target_is_over_when_resumed(tmp_path):
    settings = replace(SETTINGS, target_loss=1e9)
    first = Simulation(digits(), er8(), settings)
    assert len(list(first)) == 2  # it must hold, not just be met
    first.save(tmp_path / "checkpoint.pt")
    second = Simulation(digits(), er8(), settings)
    second.load(tmp_path / "checkpoint.pt")
    assert list(second) == []


def test_evaluating_less_often_does_not_change_a_rate_that_follows_the_loss():
    schedule = Plateau(base=0.5, factor=2)
    rates = []
    for every in (1, 3):
        settings = Settings(epochs=6, schedule=schedule, evaluate_every=every)
        task = quadratic(start=0.1, steps_per_epoch=2)
        rates.append([r.learning_rate for r in Simulation(task, er8(), settings)])
    assert rates[0] == rates[1]
    assert len(set(rates[0])) > 1


def test_a_damaged_checkpoint_is_refused(tmp_path):
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(InputError, match="not a readable checkpoint"):
        Simulation(digits(), er8(), SETTINGS).load(path)


def test_workers_of_plan_and_task_must_agree():
    with pytest.raises(InputError, match="8 workers and the task for 4"):
        Simulation(digits(4), er8(), SETTINGS)


def test_an_engine_serves_several_plans():
    task = digits()
    first = Simulation(task, er8(), SETTINGS)
    list(first)
    reused = list(Simulation(task, er8("vanilla", 1.0), SETTINGS, engine=first.engine))
    assert reused == list(Simulation(digits(), er8("vanilla", 1.0), SETTINGS))
    with pytest.raises(InputError, match="another task"):
        Simulation(digits(), er8(), SETTINGS, engine=first.engine)


@pytest.mark.parametrize(("strategy", "budget"), [("vanilla", 1.0), ("matcha", 0.3)])
def test_consensus_distance_is_what_the_plan_foresees(strategy, budget):
    """Independent noise, a small step: the steady state is η²σ² times the plan's figure."""
    task = quadratic(heterogeneity=0.0, dimension=400, steps_per_epoch=150, start=0.0)
    settings = Settings(
        epochs=4, schedule=Constant(base=0.01), execution=Execution(precision="float64")
    )
    records = list(Simulation(task, er8(strategy, budget), settings))[1:]
    measured = np.mean([record.consensus_distance for record in records])
    foreseen = np.mean([record.predicted_consensus for record in records])
    assert measured == pytest.approx(foreseen, rel=0.35)


def test_momentum_raises_the_foreseen_distance():
    task = quadratic(heterogeneity=0.0, dimension=400, steps_per_epoch=150, start=0.0)
    settings = Settings(
        epochs=4,
        schedule=Constant(base=0.002),
        optimizer=SGD(momentum=0.9),
        execution=Execution(precision="float64"),
    )
    records = list(Simulation(task, er8("matcha", 0.3), settings))[1:]
    measured = np.mean([record.consensus_distance for record in records])
    foreseen = np.mean([record.predicted_consensus for record in records])
    assert measured == pytest.approx(foreseen, rel=0.5)


def test_averaged_statistics_are_the_workers_mean():
    simulation = Simulation(digits(), er8(), replace(SETTINGS, statistics="averaged", epochs=1))
    list(simulation)
    workers = simulation.engine.workers
    assert len({tuple(row.tolist()) for row in workers.buffers}) == 8  # local in training
    name = "norm.running_mean"
    expected = dict(workers.buffer_layout.views(workers.buffers.mean(0)))[name]
    torch.testing.assert_close(dict(simulation.average().named_buffers())[name], expected)


def test_a_staged_plan_foresees_by_the_stage_in_force():
    staged = staged_plan(matcha.families.paper("er8"), {0: 1.0, 150: 0.1}, strategy="periodic")
    task = quadratic(heterogeneity=0.0, dimension=400, steps_per_epoch=150, start=0.0)
    settings = Settings(
        epochs=2, schedule=Constant(base=0.01), execution=Execution(precision="float64")
    )
    first, second = Simulation(task, staged, settings)
    errors = [level.consensus_error for level in sorted(staged.levels, key=lambda p: -p.budget)]
    # The noise is the same in both stages, so the foreseen distances part as the errors do.
    assert second.predicted_consensus / first.predicted_consensus == pytest.approx(
        errors[1] / errors[0], rel=0.2
    )


def test_the_gradient_norm_stands_beside_its_bound(tmp_path):
    task, plan = quadratic(), er8("vanilla", 1.0)
    settings = Settings(epochs=3, schedule=Constant(base=0.02), delays=Delays(compute_time=1))
    simulation = Simulation(task, plan, settings)
    records = list(simulation)
    assert all(0 < record.gradient_norm < record.gradient_bound for record in records)
    expected = [task.gradient_bound(plan.rho, record.iteration, 0.02) for record in records]
    assert [record.gradient_bound for record in records] == expected
    # The average runs over all iterations, also over those before a checkpoint.
    first = Simulation(task, plan, settings)
    next(iter(first))
    first.save(tmp_path / "checkpoint.pt")
    resumed = Simulation(task, plan, settings)
    resumed.load(tmp_path / "checkpoint.pt")
    assert list(resumed) == records[1:]


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": SGD(momentum=0.9)},
        {"overlap": True},
        {"schedule": Constant(base=0.5)},
        {"schedule": StepDecay(base=0.02, milestones=(1,))},
    ],
)
def test_no_bound_where_theorem_2_is_silent(change):
    settings = replace(Settings(epochs=1, schedule=Constant(base=0.02)), **change)
    (record,) = Simulation(quadratic(), er8("vanilla", 1.0), settings)
    assert record.gradient_norm > 0
    assert record.gradient_bound is None
