from __future__ import annotations

import importlib
import time
from dataclasses import replace

import pytest
import torch
from tests.simulation.tasks import er8

import matcha
from matcha.errors import InputError
from matcha.records import read_run
from matcha.simulation import Constant, Delays, Runner, Settings, Simulation
from matcha.simulation.simulate import CHECKPOINT, on_threads
from matcha.training.jobs import Job, check_free, make_jobs
from matcha.zoo.recipes import Choices, recipe

simulate_module = importlib.import_module("matcha.simulation.simulate")
RECIPE = recipe("logistic")
CHOICES = Choices(num_workers=4, num_train=192, num_test=30)
SETTINGS = Settings(
    epochs=3,
    schedule=Constant(base=0.05),
    optimizer=RECIPE.optimizer,
    delays=Delays(compute_time=1.0),
)
PLANS = [matcha.plan(matcha.families.ring(4), 0.5, "periodic")]


def job(output, **changes) -> Job:
    options = {"choices": CHOICES, "settings": SETTINGS} | changes
    task = RECIPE.spec(options["choices"])
    (made,) = make_jobs(task, PLANS, options["settings"], output=output)
    return made


def test_a_stopped_run_goes_on_to_the_same_records(tmp_path):
    whole = list(Runner().run(job(tmp_path / "whole")))
    started = Runner().run(job(tmp_path / "parts"))
    next(started)
    started.close()
    rest = list(Runner().run(job(tmp_path / "parts"), resume=True))
    assert rest == whole[1:]
    assert read_run(job(tmp_path / "parts").directory).records == tuple(whole)


def test_without_a_checkpoint_a_run_starts_over(tmp_path):
    whole = list(Runner().run(job(tmp_path)))
    (job(tmp_path).directory / CHECKPOINT).unlink()
    assert list(Runner().run(job(tmp_path), resume=True)) == whole
    assert read_run(job(tmp_path).directory).records == tuple(whole)


def test_jobs_that_differ_in_their_plan_share_an_engine(tmp_path):
    vanilla = matcha.plan(matcha.families.ring(4), 1.0, "vanilla")
    jobs = make_jobs(
        RECIPE.spec(CHOICES), [*PLANS, vanilla], SETTINGS, output=tmp_path / "together"
    )
    runner = Runner()
    together = [list(runner.run(each)) for each in jobs]
    alone = [list(Runner().run(replace(each, directory=tmp_path / each.label))) for each in jobs]
    assert together == alone


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"choices": replace(CHOICES, batch_size=8)}, "batch_size"),
        ({"choices": replace(CHOICES, partition="shards")}, "partition"),
        ({"settings": replace(SETTINGS, overlap=True)}, "overlap"),
        ({"settings": replace(SETTINGS, schedule=Constant(base=0.1))}, "schedule"),
    ],
)
def test_another_run_is_not_resumed(tmp_path, change, name):
    list(Runner().run(job(tmp_path)))
    with pytest.raises(InputError, match=f"another {name}"):
        check_free([job(tmp_path, **change)], resume=True)
    with pytest.raises(InputError, match=f"another {name.replace('_', ' ')}"):
        list(Runner().run(job(tmp_path, **change), resume=True))


def test_jobs_share_one_clock_in_any_order_and_when_repeated(tmp_path):
    plans = [er8("vanilla"), er8("greedy", 0.3), er8("vanilla")]
    clocks = []
    for number, order in enumerate((plans, plans[::-1])):
        runner = Runner()
        tasks = [RECIPE.spec(Choices(num_workers=8), seed=seed) for seed in (0, 1)]
        place = tmp_path / str(number)
        made = [
            job
            for task in tasks
            for job in make_jobs(task, order, Settings(epochs=1), output=place)
        ]
        records = {each.directory.name: list(runner.run(each))[-1] for each in made}
        assert len(records) == 6
        clocks.append(records)
        seconds = {record.compute_seconds for record in records.values()}
        assert len(seconds) == 1
        assert records["vanilla-1-s0"].time == records["vanilla-1-s0-2"].time


@pytest.mark.parametrize("kind", ["name", "spec", "task"])
def test_a_task_is_simulated_in_memory_as_in_a_directory(tmp_path, kind):
    chosen = CHOICES if kind != "name" else Choices(num_workers=4)
    task = {"name": "logistic", "spec": RECIPE.spec(chosen), "task": RECIPE.task(chosen)}[kind]
    plans = [*PLANS, matcha.plan(matcha.families.ring(4), 1.0, "vanilla")]
    in_memory = matcha.simulate(task, plans, SETTINGS)
    on_disk = matcha.simulate(task, plans, SETTINGS, output=tmp_path)
    assert [run.path for run in in_memory] == [None, None]
    assert [run.path for run in on_disk] == [
        tmp_path / "periodic-0.5-s0", tmp_path / "vanilla-1-s0",
    ]  # fmt: skip
    for kept, written in zip(in_memory, on_disk, strict=True):
        assert kept.records == written.records
        assert kept.plan.digest == written.plan.digest
        assert kept.header.config["settings"] == written.header.config["settings"]
    with pytest.raises(InputError, match="already holds a run"):
        matcha.simulate(task, plans, SETTINGS, output=tmp_path)


def test_a_recipes_settings_are_the_default_and_a_tasks_must_be_given():
    with pytest.raises(InputError, match="give Settings"):
        matcha.simulate(RECIPE.task(CHOICES), PLANS)
    with pytest.raises(InputError, match="at least one plan"):
        matcha.simulate("logistic", [])
    unfit = replace(SETTINGS, delays=Delays(speeds=(1.0, 2.0)))
    with pytest.raises(InputError, match="speeds for 4 workers"):
        matcha.simulate(RECIPE.spec(CHOICES), PLANS, unfit)


@pytest.mark.parametrize(
    ("seconds", "chosen"), [({2: 0.5, 1: 1.0}, 2), ({2: 0.95, 1: 1.0}, 1), ({2: 2.0, 1: 1.0}, 1)]
)
def test_a_run_has_the_threads_that_were_quicker_when_measured_once(monkeypatch, seconds, chosen):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    measured = []

    def time_gradients(self) -> float:
        measured.append(torch.get_num_threads())
        return seconds[measured[-1]]

    monkeypatch.setattr(Simulation, "time_gradients", time_gradients)
    with on_threads(2):
        runner, seen = Runner(), []
        for _ in range(2):
            seen.extend(torch.get_num_threads() for _ in runner.run(job(None)))
        assert torch.get_num_threads() == 2
    assert set(seen) == {chosen}
    assert measured == [2, 1]


def test_a_resumed_run_has_the_threads_that_it_had(monkeypatch, tmp_path):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(simulate_module, "quickest_threads", lambda _: 2)
    started = Runner().run(job(tmp_path))
    next(started)
    started.close()
    monkeypatch.setattr(simulate_module, "quickest_threads", lambda _: 1)
    threads = {torch.get_num_threads() for _ in Runner().run(job(tmp_path), resume=True)}
    assert threads == {2}


def test_what_the_user_asked_for_stays(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(Simulation, "time_gradients", lambda self: pytest.fail("measured"))
    with on_threads(2):
        threads = {torch.get_num_threads() for _ in Runner().run(job(None))}
    assert threads == {2}


def test_the_least_of_several_measurements_counts():
    simulation = Simulation(RECIPE.task(CHOICES), PLANS[0], replace(SETTINGS, delays=Delays()))
    naps = iter([0.0, 0.0, 0.08, 0.0, 0.08, 0.0, 0.08, 0.0, 0.08, 0.0])
    simulation.engine._run = lambda part: time.sleep(next(naps))  # type: ignore[method-assign]
    assert simulation.compute_time < 0.08 / 4
