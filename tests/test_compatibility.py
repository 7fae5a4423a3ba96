"""Files that earlier versions wrote: read, or refused with a sentence that says what to do."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from matcha._io import save_document
from matcha.distributed import Gossip, Network, run_threads, run_worker
from matcha.errors import InputError, PlanError
from matcha.plans import Figures, load_plan
from matcha.records import read_run
from matcha.simulation import Runner, Settings
from matcha.training.jobs import Job
from matcha.zoo.recipes import Choices, recipe

OLD = Path(__file__).parent / "data" / "v0.1"
SIMULATED = OLD / "simulated" / "matcha-0.5-s0"
TRAINED = OLD / "trained"
LOGISTIC = recipe("logistic")


def job(directory: Path) -> Job:
    """What 0.1 ran there, asked for again."""
    return Job(
        directory=directory,
        task=LOGISTIC.spec(Choices(num_workers=3)),
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
    # What 0.1 called the training loss was the workers' own.
    assert run.records[-1].worker_loss < run.records[0].worker_loss
    assert run.records[-1].train_loss is None


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
        model = wanted.task.make().model()
        optimizer = LOGISTIC.optimizer.for_model(model.parameters())
        with Gossip(model, optimizer, wanted.plan, transport=transport, deadline=60) as gossip:
            gossip.load(folder / "checkpoints", average=True)
            return gossip.iteration

    assert run_threads(3, average) == [62, 62, 62]


DRAWN = {
    "plan-cliques.json": [[0, 1, 2, 11], [11], [3, 4, 5, 11], [], [], [9], [], []],
    "plan-greedy.json": [[0], [1], [0], [1], [0], [1], [0], [1]],
    "plan-matcha.json": [[1], [1], [0], [1], [], [1], [0], [0, 1]],
    "plan-periodic.json": [[], [0, 1], [], [0, 1], [], [0, 1], [], [0, 1]],
    "plan-single.json": [[1], [1], [0], [1], [1], [1], [0], [0]],
    "plan-vanilla.json": [[0, 1]] * 8,
    "staged-on-demand.json": [[], [], [], [0, 1], [], [], [], [0, 1]],
    "staged.json": [[], [2, 3], [], [2, 3], [], [2, 3], [], [2, 3]],
}
"""The rounds that 0.1 drew from the plans that it wrote."""


@pytest.mark.parametrize("name", DRAWN)
def test_plans_draw_the_rounds_that_they_drew(name: str, tmp_path: Path) -> None:
    plan = load_plan(OLD / name)
    assert [list(plan.round(k).indices) for k in range(8)] == DRAWN[name]
    old = json.loads((OLD / name).read_text())
    documents = old.get("levels", [old])
    for level, document in zip(plan.levels, documents, strict=True):
        assert level.seed == document["seed"]
        assert list(level.probabilities) == pytest.approx(document["probabilities"])
        for figure in ("rho", "algebraic_connectivity", "consensus_error", "expected_comm_time"):
            assert getattr(level, figure) == document[figure]
            derived = replace(level, figures=Figures())
            assert getattr(derived, figure) == pytest.approx(document[figure], abs=1e-6)
    # Written anew, they are plans of this version with the same rounds.
    plan.save(tmp_path / "plan.json")
    again = load_plan(tmp_path / "plan.json")
    assert (again, again.digest) == (plan, plan.digest)
    assert json.loads((tmp_path / "plan.json").read_text())["schema"].endswith("/2")


def test_plans_of_later_versions_are_refused(tmp_path: Path) -> None:
    document = load_plan(OLD / "plan-greedy.json").to_json() | {"schema": "matcha.plan/99"}
    save_document(document, tmp_path / "plan.json")
    with pytest.raises(PlanError, match=r"matcha\.plan/99.*make it anew with `matcha plan`"):
        load_plan(tmp_path / "plan.json")
