from __future__ import annotations

import json

import pytest
from tests.quadratics import write_quadratic_run

import matcha
from matcha.records import read_run
from matcha.report.page import build_payload
from matcha.strategies import staged_plan


def test_the_payload_holds_the_records(run_folders):
    runs = [read_run(folder) for folder in run_folders]
    payload = build_payload(runs)
    curve = payload["runs"][0]["curves"]["train_loss"]
    assert curve["y"][-1] == pytest.approx(runs[0].records[-1].train_loss, rel=1e-4)
    assert curve["time"][-1] == pytest.approx(runs[0].records[-1].time, rel=1e-4)
    assert [run["style"] for run in payload["runs"]] == [0, 1, 2, 3]
    assert json.loads(json.dumps(payload, allow_nan=False)) == payload


def test_runs_on_two_topologies_share_a_page(tmp_path):
    runs = []
    for name in ("ring:4", "star:5", "ring:4"):
        plan = matcha.plan(matcha.families.parse(name), 0.5, "periodic")
        folder = tmp_path / str(len(runs))
        runs.append(read_run(write_quadratic_run(folder, plan, iterations=10)))
    payload = build_payload(runs)
    assert [net["name"] for net in payload["networks"]] == ["ring:4", "star:5"]
    assert [run["network"] for run in payload["runs"]] == [0, 1, 0]


def test_a_staged_plan_stands_in_the_sweep_level_by_level():
    staged = staged_plan(matcha.families.ring(4), {0: 0.45, 100: 0.15}, strategy="periodic")
    (network,) = build_payload([], [staged])["networks"]
    for level in staged.levels:
        point = network["strategies"]["periodic"][network["budgets"].index(level.budget)]
        assert point["rho"] == pytest.approx(level.rho, rel=1e-3)
