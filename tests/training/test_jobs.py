from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

import matcha
from matcha.errors import InputError
from matcha.plans import Events, Loss
from matcha.records import Record, read_run
from matcha.training.jobs import carry_out, check_free, make_jobs, with_asynchronous
from matcha.training.settings import Settings
from matcha.zoo.recipes import Choices, recipe

SETTINGS = Settings(epochs=5)
PLANS = [matcha.plan(matcha.families.ring(4), 0.5, "periodic")]


def jobs(output, plans=PLANS, seeds=(0,)):
    specs = [recipe("logistic").spec(Choices(num_workers=4), seed=seed) for seed in seeds]
    return [job for spec in specs for job in make_jobs(spec, plans, SETTINGS, output=output)]


@dataclass
class Counter:
    """A trainer whose training is to count its epochs, and which notes when it was saved."""

    iteration: int = 0
    saved: list[int] = field(default_factory=list)

    @property
    def is_over(self):
        return self.iteration == 5

    def __iter__(self):
        while not self.is_over:
            self.iteration += 1
            yield Record(iteration=self.iteration, epoch=float(self.iteration), worker=0)
            yield Record(iteration=self.iteration, epoch=float(self.iteration))

    def save(self, path):
        self.saved.append(self.iteration)


def test_every_plan_and_seed_has_a_directory_of_its_own(tmp_path):
    made = jobs(tmp_path, PLANS * 2, seeds=(0, 1))
    assert [job.directory.name for job in made] == [
        "periodic-0.5-s0",
        "periodic-0.5-s0-2",
        "periodic-0.5-s1",
        "periodic-0.5-s1-2",
    ]
    assert [job.header().seed for job in made] == [0, 0, 1, 1]
    check_free(made, resume=False)
    with pytest.raises(InputError, match="two runs would write to the same directory"):
        check_free([made[0], made[0]], resume=False)


@pytest.mark.parametrize(
    ("every", "saved"), [(0, []), (2, [2, 4, 5]), (1, [1, 2, 3, 4, 5]), (9, [5])]
)
def test_checkpoints_come_as_often_as_asked_and_at_the_end(tmp_path, every, saved):
    trainer, (job,) = Counter(), jobs(tmp_path)
    records = list(carry_out(job, trainer, tmp_path / "state", checkpoint_every=every))
    assert trainer.saved == saved
    assert [record.epoch for record in records] == [1, 2, 3, 4, 5]
    assert len(read_run(job.directory).worker_records[0]) == 5


def test_a_run_goes_on_after_its_checkpoint_and_is_not_run_over(tmp_path):
    (job,) = jobs(tmp_path)
    list(carry_out(job, Counter(), tmp_path / "state"))
    with pytest.raises(InputError, match="already holds a run"):
        check_free([job], resume=False)
    check_free([job], resume=True)
    rest = list(carry_out(job, Counter(iteration=3), tmp_path / "state", resume=True))
    assert [record.iteration for record in rest] == [4, 5]
    assert [record.iteration for record in read_run(job.directory).records] == [1, 2, 3, 4, 5]
    other = replace(job, task=recipe("logistic").spec(Choices(num_workers=4, batch_size=8)))
    with pytest.raises(InputError, match="another batch_size"):
        check_free([other], resume=True)


def test_beside_each_job_of_pairs_stands_the_same_asynchronously(tmp_path):
    plans = [matcha.plan(matcha.families.ring(4), 1.0, "allreduce"), *PLANS]
    found = with_asynchronous(jobs(tmp_path, plans, seeds=[3]))
    assert [job.directory.name for job in found] == [
        "allreduce-0.75-s3", "periodic-0.5-s3", "periodic-0.5-s3-asynchronous",
    ]  # fmt: skip
    assert [job.settings.asynchronous for job in found] == [False, False, True]
    assert found[-1].label == "periodic 0.5, asynchronous"
    with pytest.raises(InputError, match="leave one of the two out"):
        replace(found[-1], events=Events(losses=(Loss(worker=1, at=2),)))
