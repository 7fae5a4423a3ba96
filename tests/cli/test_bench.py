from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from tests.commands import matcha_command, matcha_process

ROOT = Path(__file__).parents[2]


def test_benchmarks_are_listed_with_what_they_measure():
    done = matcha_command("bench", "--json")
    listed = json.loads(done.stdout)
    assert {"planner", "strategies", "basics"} <= set(listed)
    assert all(line.endswith(".") for line in listed.values()), listed
    shared = {"harness"}  # which measures nothing
    assert set(listed) == {file.stem for file in (ROOT / "benchmarks").glob("*.py")} - shared


def test_beside_benchmarks_stands_nothing_else():
    """What several of them share is in parts/, so that no list says what is none."""
    for file in (ROOT / "benchmarks").glob("*.py"):
        assert 'if __name__ == "__main__":' in file.read_text(encoding="utf-8"), file
    for file in (ROOT / "benchmarks" / "parts").glob("*.py"):
        assert "__main__" not in file.read_text(encoding="utf-8"), file


def test_arguments_reach_the_benchmark():
    done = matcha_process("bench", "planner", "--nonsense")
    assert done.returncode == 2
    assert "unrecognized arguments: --nonsense" in done.stderr


def test_results_go_to_the_current_folder_and_not_over_the_committed_ones(tmp_path):
    committed = ROOT / "benchmarks" / "results"
    before = {file: file.stat().st_mtime_ns for file in committed.rglob("*")}
    done = matcha_process("bench", "basics", "--quick", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "basics.json").read_text())
    assert {file: file.stat().st_mtime_ns for file in committed.rglob("*")} == before


def test_bad_names_are_one_sentence():
    done = matcha_command("bench", "planer")
    assert done.returncode == 2
    assert "did you mean 'planner'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_installed_package_says_where_the_benchmarks_are(tmp_path):
    shutil.copytree(ROOT / "src" / "matcha", tmp_path / "a" / "b" / "matcha")
    code = "from matcha.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "bench"],
        capture_output=True, text=True, cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "a" / "b"), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 2
    assert "clone of the repository" in done.stderr
