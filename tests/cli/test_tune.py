from __future__ import annotations

import json

from typer.testing import CliRunner

import matcha
from matcha.cli import app
from matcha.errors import InputError


def test_the_chosen_plan_is_told_saved_and_drawn(tmp_path):
    run = CliRunner().invoke
    common = ["tune", "paper:er8", "--compute-time", "0.1", "--effort", "none"]
    common += ["--budget", "0.1,0.5", "--strategy", "greedy,vanilla"]
    out, figure = tmp_path / "plan.json", tmp_path / "tune.png"
    result = run(app, [*common, "--link-time", "0.1", "--output", str(out), "--plot", str(figure)])
    assert result.exit_code == 0, result.output
    assert "is predicted to reach the target" in result.output
    plan = matcha.Plan.load(out)
    assert plan.num_workers == 8
    assert f"* {plan.strategy}" in result.output
    assert plan.wire.name in result.output
    assert figure.stat().st_size > 1000
    result = run(app, [*common, "--link-time", "0.1", "--json"])
    assert json.loads(result.stdout)["topology"] == "paper:er8"
    result = run(app, common)
    assert isinstance(result.exception, InputError)


def test_with_a_task_the_best_few_are_tried(tmp_path):
    out = tmp_path / "plan.json"
    command = ["tune", "ring:4", "--compute-time", "0.01", "--link-time", "0.1", "--effort", "none"]
    command += [
        "--task",
        "logistic",
        "--learning-rate",
        "0.2",
        "--epochs",
        "6",
        "--max-trials",
        "3",
    ]
    command += ["--budget", "0.02,0.2", "--strategy", "greedy", "--wire", "float32,modulo:4"]
    result = CliRunner().invoke(app, [*command, "--json", "--output", str(out)])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert 1 <= document["tried"] <= 3
    assert document["best"]["tried"]
    assert document["target_loss"] > 0
    assert matcha.Plan.load(out).wire.name == document["best"]["wire"]


def test_settings_of_trials_need_a_task():
    command = ["tune", "ring:4", "--compute-time", "1", "--link-time", "1", "--epochs", "3"]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, InputError)
    assert "--task" in str(result.exception)
