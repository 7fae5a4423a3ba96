from __future__ import annotations

from dataclasses import replace

import pytest
from tests.simulation.tasks import er8

import matcha
from matcha.errors import InputError
from matcha.records import read_run
from matcha.simulation import Constant, Delays, Runner, Settings
from matcha.simulation.runner import CHECKPOINT
from matcha.training.jobs import Job, check_free, make_jobs
from matcha.zoo.recipes import Choices, recipe

RECIPE = recipe("logistic")
CHOICES = Choices(num_workers=4, num_train=192, num_test=30)
SETTINGS = Settings(
    epochs=3,
    schedule=Constant(base=0.05),
    optimizer=RECIPE.optimizer,
    delays=Delays(compute_seconds=1.0),
)
PLANS = [matcha.plan(matcha.families.ring(4), 0.5, "periodic")]


def job(output, **changes) -> Job:
    options = {"choices": CHOICES, "settings": SETTINGS} | changes
    task = RECIPE.spec(options["choices"])
    (made,) = make_jobs([task], PLANS, options["settings"], output=output)
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
    tasks = [RECIPE.spec(CHOICES)]
    jobs = make_jobs(tasks, [*PLANS, vanilla], SETTINGS, output=tmp_path / "together")
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
        made = make_jobs(tasks, order, Settings(epochs=1), output=tmp_path / str(number))
        records = {each.directory.name: list(runner.run(each))[-1] for each in made}
        assert len(records) == 6
        clocks.append(records)
        seconds = {record.compute_seconds for record in records.values()}
        assert len(seconds) == 1
        assert records["vanilla-1-s0"].time == records["vanilla-1-s0-2"].time
