from __future__ import annotations

import json

import pytest

import matcha
from commands import matcha_command
from quadratics import write_quadratic_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    plan = matcha.plan(matcha.families.ring(4), 0.5, "matcha")
    folder = tmp_path_factory.mktemp("runs") / "run"
    return write_quadratic_run(folder, plan, iterations=50, config={"epochs": 1})


def test_once_shows_a_finished_run(run):
    done = matcha_command("watch", run, "--once")
    assert done.returncode == 0, done.stderr
    assert "consensus distance" in done.stdout
    assert "talking" in done.stdout


def test_a_finished_run_ends_the_view_by_itself(run):
    done = matcha_command("watch", run)
    assert done.returncode == 0, done.stderr
    assert "epoch 1 of 1" in done.stdout


def test_the_newest_record_comes_as_json(run):
    record = json.loads(matcha_command("watch", run, "--json").stdout)
    assert record["iteration"] == 50


def test_no_run_is_one_sentence(tmp_path):
    done = matcha_command("watch", tmp_path)
    assert done.returncode == 2
    assert "holds no run" in done.stderr
