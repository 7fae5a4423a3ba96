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
    assert "reaches the target" in result.output
    assert matcha.Plan.load(out).num_workers == 8
    assert figure.stat().st_size > 1000
    result = run(app, [*common, "--link-time", "0.1", "--json"])
    assert json.loads(result.stdout)["topology"] == "paper:er8"
    result = run(app, common)
    assert isinstance(result.exception, InputError)
