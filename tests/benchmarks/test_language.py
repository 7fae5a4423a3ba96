"""The list of language models: its plans, its order, and a tiny run of it that goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from benchmarks import language

ROOT = Path(__file__).parents[2]
BARE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("scipy", "networkx", "rustworkx", "typer", "rich"):
            raise ImportError(f"{name} is not on this machine")

sys.meta_path.insert(0, Missing())
sys.argv = sys.argv[1:]
sys.path.insert(0, "benchmarks")
import language
language.main()
"""


def test_plans_are_those_that_were_written():
    written = json.loads(language.PLANS.read_text(encoding="utf-8"))
    assert list(written) == list(language.METHODS)
    for name, method in language.METHODS.items():
        assert language.plan_of(name).digest == method.plan().digest, name


def test_the_first_runs_are_rows_of_the_grid():
    rates = [float(rate) for rate in language.RATES.split(",")]
    for method, rate in language.FIRST:
        assert method in language.METHODS
        assert rate in rates


def test_rows_are_done_at_all_rates_before_the_best_get_more_seeds():
    same = {"model": "m"}
    rows = list(language.grid(["allreduce", "local-8", "g3-4"], [3e-3, 6e-3], [0], same))
    assert [(row["method"], row["rate"]) for row in rows] == [
        *[("g3-4", 6e-3), ("local-8", 6e-3), ("allreduce", 6e-3)],  # the first runs
        *[("allreduce", 3e-3), ("local-8", 3e-3), ("g3-4", 3e-3)],
    ]
    found = [("allreduce", 0.1, 2.0, 1.0), ("allreduce", 0.2, 1.9, 1.0), ("local-8", 0.1, 2.5, 0.1)]
    found += [("diloco-8-0.9", 0.1, 2.6, 0.1), ("g3-1", 0.2, 2.4, 0.05), ("g3-1", 0.1, 3.0, 0.05)]
    known = [
        {"method": name, "rate": rate, "seed": 0, "loss": loss, "share": share} | same
        for name, rate, loss, share in found
    ]
    assert language.best(known, same, 3) == [("allreduce", 0.2), ("g3-1", 0.2), ("local-8", 0.1)]
    assert language.best(known, same, 9)[3:] == [("diloco-8-0.9", 0.1)]


def test_a_tiny_list_runs_without_the_planner_and_goes_on(tmp_path):
    """With torch, numpy and tokenizers alone; what is done is not done again."""
    words = np.random.default_rng(0).choice(["wire", "link", "plan", "rate", "step"], 9_000)
    for k, part in enumerate(np.split(words, 50)):
        (tmp_path / f"{k}.txt").write_text(" ".join(part), encoding="utf-8")
    output = tmp_path / "found.jsonl"

    def run(*more: str) -> str:
        asked = ["language", "--data", str(tmp_path), "--output", str(output), "--best", "0"]
        asked += ["--methods", "g3-1-shared,sparseloco-8", "--rates", "2e-3", "--model"]
        asked += ["transformer-1m", "--batch-size", "2", "--iterations", "2", *more]
        command = [sys.executable, "-c", BARE, *asked]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "no time is left" in run("--seconds", "10")
    assert len(run().splitlines()) == 2
    assert run("--list") == ""
    rows = language.read(output)
    assert [row["method"] for row in rows] == ["g3-1-shared", "sparseloco-8"]
    assert all(0 < row["loss"] < 10 for row in rows)
