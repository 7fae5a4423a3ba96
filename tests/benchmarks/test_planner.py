"""The planner's benchmark runs; what it measures is not asserted here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "planner.py"


@pytest.mark.parametrize("family", ["erdos-renyi", "geometric"])
def test_a_row_is_a_certified_plan(family):
    command = [sys.executable, str(SCRIPT), "--row", "matcha", family, "96"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    row = json.loads(done.stdout)
    assert row["gap"] <= 1e-6
    assert 0 < row["rho"] < 1
    assert row["links"] >= 95


def test_the_committed_results_meet_every_bar():
    results = json.loads((SCRIPT.parent / "results" / "planner.json").read_text())
    assert not [verdict for verdict in results["verdicts"] if "MISSED" in verdict]
    assert sum("met" in verdict for verdict in results["verdicts"]) >= 8
