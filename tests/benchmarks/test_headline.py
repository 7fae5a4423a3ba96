"""What the headline says of wires must follow from its rows."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "network"


@pytest.fixture
def headline(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("headline")


def test_rows_and_what_a_wire_gains_go_by_their_clock(headline) -> None:
    losses = [0.5, 0.2, 0.09, 0.08]  # held at iteration 14.5
    found = {
        "silent": {"iterations": [1.0], "seconds": 0.05, "core_each": 0.04},
        "DDP": {"iterations": losses, "seconds": 0.8, "core_each": 0.7},
        "greedy 0.02": {"iterations": losses, "seconds": 0.15, "core_each": 0.12},
        "greedy 0.02, bfloat16": {"iterations": losses, "seconds": 0.01, "core_each": 0.01},
        "greedy 0.02, modulo:4": {"iterations": losses, "seconds": 0.1},
    }
    shared, own = (headline._by(found, clock) for clock in ("seconds", "core_each"))
    by_name = {row["method"]: row for row in shared["rows"]}
    assert by_name["greedy 0.02, modulo:4"]["of_ceiling"] == pytest.approx(0.1 / 0.05)
    assert "1.50 times as fast, and 2.00 of the ceiling" in shared["verdict"]
    assert "is 3.00 times as fast as whole values" in shared["verdict"]
    # Not measured by this clock: no row, and nothing said of it.
    assert "greedy 0.02, modulo:4" not in {row["method"] for row in own["rows"]}
    assert own["verdict"] == ""
    assert {row["method"]: row["iteration_ms"] for row in own["rows"]}["silent"] == 40
