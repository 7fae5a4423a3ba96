"""What the arena says of a row must follow from its curve; a file of one's own adds rows."""

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def arena(monkeypatch):
    for folder in (ROOT, ROOT / "network", ROOT / "arena"):
        monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "run", raising=False)
    found = importlib.import_module("run")
    yield found
    sys.modules.pop("run")


def curve(losses, pace):
    return [
        {"iteration": 5 * n, "loss": loss, "seconds": 5 * n * pace, "megabytes": 2.0 * n}
        for n, loss in enumerate(losses, 1)
    ]


def test_the_target_counts_where_it_is_held(arena):
    assert arena.reached(curve([0.5, 0.09, 0.2, 0.12, 0.08, 0.07], 0.1)) == {
        "iteration": 22.5,
        "loss": pytest.approx(0.1),
        "seconds": pytest.approx(2.25),
        "megabytes": 9.0,
    }
    assert arena.reached(curve([0.5, 0.09], 0.1)) is None


def test_the_ceiling_is_ddps_iterations_at_the_pace_of_silence(arena):
    curves = {
        "silent": curve([1.0, 1.0], 0.04),
        "DDP": curve([0.3, 0.1, 0.05], 0.8),
        "ours": curve([0.3, 0.2, 0.1, 0.05], 0.05),
        "never began": [],
    }
    rows = {row["method"]: row for row in arena.table_rows(curves)}
    assert rows["ours"]["of_ceiling"] == pytest.approx(15 * 0.05 / (10 * 0.04))
    assert rows["silent"]["of_ceiling"] is None
    said = arena.describe({"curves": {"200": curves}})
    assert "never began" in said
    assert "ceiling: 0.40 s, DDP's 10 iterations (measured here) at silence's 40 ms" in said
    curves["DDP"] = curve([0.3, 0.3], 0.8)
    said = arena.describe({"curves": {"10": curves}})
    assert "DDP's 80 iterations (the headline's: here DDP did not get there)" in said


def test_a_file_adds_rows_and_a_missing_package_is_named(arena, tmp_path, monkeypatch, capsys):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "own.py").write_text("ROWS = {'own': print}")
    (tmp_path / "rows" / "other.py").write_text("import no_such_package")
    monkeypatch.setattr(arena, "HERE", tmp_path)
    assert arena.known_rows() == {"own": print}
    assert "no_such_package" in capsys.readouterr().err
