"""Files that earlier versions wrote: read, or refused with a sentence that says what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from matcha._io import save_document
from matcha.distributed import Network, run_worker
from matcha.errors import PlanError
from matcha.plans import load_plan
from matcha.records import read_run
from matcha.simulation import Delays, Runner, Settings
from matcha.testing import run_threads
from matcha.training.jobs import Job
from matcha.zoo.recipes import Choices, recipe

OLD = Path(__file__).parent / "data" / "v0.1"
OF_0_2 = Path(__file__).parent / "data" / "v0.2"
LOGISTIC = recipe("logistic")


def job(directory: Path, **changes) -> Job:
    """What 0.2 ran there, asked for again."""
    settings = {
        "epochs": 3,
        "schedule": LOGISTIC.schedule(3),
        "optimizer": LOGISTIC.optimizer,
        "overlap": True,
        "delays": Delays(compute_time=0.01),
    }
    return Job(
        directory=directory,
        task=LOGISTIC.spec(Choices(num_workers=3, num_train=96, num_test=20)),
        plan=load_plan(directory / "plan.json"),
        settings=Settings(**settings | changes),
    )


@pytest.mark.parametrize("kind", ["simulated", "asynchronous"])
def test_a_simulation_of_0_2_goes_on_to_the_same_records(tmp_path: Path, kind: str) -> None:
    folder = shutil.copytree(OF_0_2 / kind, tmp_path / kind)
    assert read_run(folder).header.setting("overlap") == (kind == "simulated")
    changes = {"asynchronous": True, "overlap": False} if kind == "asynchronous" else {}
    list(Runner().run(job(folder, **changes), resume=True))
    whole = (OF_0_2 / f"{kind}-records.jsonl").read_text().splitlines()
    records = (folder / "records.jsonl").read_text().splitlines()
    # Processors differ in the last bits of float32, so figures are compared and not bytes.
    for record, wanted in zip(records, whole, strict=True):
        found = json.loads(record)
        found.pop("function_distance", None)  # 0.2 did not know it
        assert found == pytest.approx(json.loads(wanted), rel=1e-6, abs=1e-6)


def test_a_training_of_0_2_goes_on(tmp_path: Path) -> None:
    folder = shutil.copytree(OF_0_2 / "trained", tmp_path / "run")
    wanted = job(folder, delays=Delays(), epochs=2, schedule=LOGISTIC.schedule(3))

    def resume(transport) -> list[float]:
        return [r.epoch for r in run_worker(wanted, transport, Network(timeout=60), resume=True)]

    assert run_threads(3, resume) == [[2.0]] * 3
    before = read_run(OF_0_2 / "trained").records
    assert read_run(folder).records[: len(before)] == before


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
            derived = level.with_process()  # knows no figures
            assert getattr(derived, figure) == pytest.approx(document[figure], abs=1e-6)
    # Written anew, they are plans of this version with the same rounds.
    plan.save(tmp_path / "plan.json")
    again = load_plan(tmp_path / "plan.json")
    assert (again, again.digest) == (plan, plan.digest)
    assert json.loads((tmp_path / "plan.json").read_text())["schema"].endswith("/2")


def test_plans_of_later_versions_are_refused(tmp_path: Path) -> None:
    document = load_plan(OLD / "plan-greedy.json").to_json() | {"schema": "matcha.plan/99"}
    save_document(document, tmp_path / "plan.json")
    with pytest.raises(PlanError, match=r"matcha\.plan/99.*make it again with `matcha plan`"):
        load_plan(tmp_path / "plan.json")
