"""Files that earlier versions wrote: read, or refused with a sentence that says what to do."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from matcha.distributed import Gossip, Network, run_threads, run_worker
from matcha.errors import InputError
from matcha.plans import load_plan
from matcha.records import read_run
from matcha.simulation import Runner, Settings
from matcha.tasks.jobs import Job
from matcha.tasks.recipes import Choices, recipe

OLD = Path(__file__).parent / "data" / "v0.1"
SIMULATED = OLD / "simulated" / "matcha-0.5-s0"
TRAINED = OLD / "trained"
LOGISTIC = recipe("logistic")


def job(directory: Path) -> Job:
    """What 0.1 ran there, asked for again."""
    return Job(
        directory=directory,
        recipe=LOGISTIC,
        choices=Choices(num_workers=3),
        plan=load_plan(directory / "plan.json"),
        settings=Settings(epochs=2, schedule=LOGISTIC.schedule(2), optimizer=LOGISTIC.optimizer),
    )


@pytest.mark.parametrize(("directory", "clock"), [(SIMULATED, "simulated"), (TRAINED, "wall")])
def test_runs_are_read(directory: Path, clock: str) -> None:
    run = read_run(directory)
    assert run.header.task == "logistic"
    assert run.header.clock == clock
    assert run.header.setting("epochs") == 2
    assert run.plan.num_workers == 3
    assert [record.epoch for record in run.records] == [1, 2]
    assert run.records[-1].train_loss < run.records[0].train_loss


def test_a_simulations_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(SIMULATED, tmp_path / "run")
    with pytest.raises(InputError, match=r"of another version.* start the run anew"):
        list(Runner().run(job(folder), resume=True))
    assert read_run(folder).records == read_run(SIMULATED).records


def test_a_trainings_checkpoint_is_refused_but_its_average_can_be_taken(tmp_path: Path) -> None:
    folder = shutil.copytree(TRAINED, tmp_path / "run")
    wanted = job(folder)

    def resume(transport) -> None:
        with pytest.raises(InputError, match=r"does not say what was trained.* start the run anew"):
            run_worker(wanted, transport, Network(deadline=60), resume=True)

    run_threads(3, resume)
    assert read_run(folder).records == read_run(TRAINED).records

    def average(transport) -> int:
        model = LOGISTIC.task(wanted.choices).model()
        optimizer = LOGISTIC.optimizer.for_model(model.parameters())
        with Gossip(model, optimizer, wanted.plan, transport=transport, deadline=60) as gossip:
            gossip.load(folder / "checkpoints", average=True)
            return gossip.iteration

    assert run_threads(3, average) == [62, 62, 62]
