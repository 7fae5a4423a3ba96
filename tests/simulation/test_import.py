"""Simulation runs where the planner's and the command line's packages are absent."""

from __future__ import annotations

import subprocess
import sys

import matcha

CODE = """
import sys
absent = ("rustworkx", "clarabel", "typer", "rich", "matplotlib", "sklearn")
sys.modules.update(dict.fromkeys(absent))
from matcha import Plan
from matcha.training import jobs
from matcha.zoo import recipes
from matcha.zoo.quadratics import QuadraticTask
from matcha.simulation import Constant, Settings, Simulation

plan = Plan.load(sys.argv[1])
(record,) = Simulation(QuadraticTask(4), plan, Settings(epochs=1, schedule=Constant(base=0.1)))
print(record.iteration)
"""


def test_a_saved_plan_is_simulated_without_the_planner(tmp_path):
    path = tmp_path / "plan.json"
    matcha.plan(matcha.families.ring(4), 0.5, "periodic").save(path)
    result = subprocess.run(
        [sys.executable, "-c", CODE, str(path)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "100"
