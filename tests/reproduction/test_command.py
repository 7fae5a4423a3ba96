from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from matcha.errors import MatchaError
from reproduction.__main__ import app

ROOT = Path(__file__).parents[2]


def test_a_figure_from_plans_alone(tmp_path):
    command = ["fig3", "--quick", "-o", str(tmp_path), "--json"]
    result = subprocess.run(
        [sys.executable, "-m", "reproduction", *command], capture_output=True, text=True, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert {claim["verdict"] for claim in document["claims"]} == {"holds"}
    assert (tmp_path / "fig3.png").exists()


@pytest.mark.slow
def test_a_figure_that_trains(tmp_path):
    command = ["fig1", "--quick", "-e", "1", "--device", "cpu", "-o", str(tmp_path)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "verdict" in result.output
    lines = (tmp_path / "fig1.results.jsonl").read_text().splitlines()
    assert len(lines) == 4
    assert "Training on digits" in (tmp_path / "fig1.md").read_text()
    again = CliRunner().invoke(
        app,
        [
            *["fig1", "--quick", "--json", "-o", str(tmp_path / "again")],
            *["--from", str(tmp_path / "fig1.results.jsonl")],
        ],
    )
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["claims"]


def test_the_page_leaves_out_the_rates_that_lost_the_tuning(tmp_path):
    results = ROOT / "benchmarks/results/reproduction/cifar100.jsonl"
    rates = {json.loads(line)["item"]["learning_rate"] for line in results.read_text().splitlines()}
    assert len(rates) > 1
    command = ["fig4", "--from", str(results), "-o", str(tmp_path)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    page = (tmp_path / "fig4-cifar100-paper-er8.html").read_text()
    for label in ("vanilla, seed 0", "matcha 0.1, seed 2", "matcha 0.1, 1.5 × epochs"):
        assert label in page
    for label in ("vanilla, seed 0 (2)", "matcha 0.1, seed 0, matcha"):
        assert label not in page


def test_results_of_another_figure_are_not_drawn(tmp_path):
    results = ROOT / "benchmarks/results/reproduction/digits8.jsonl"
    for choice, words in (["fig5", "the full-scale fig5"], ["fig4", "the full-scale fig4"]):
        command = [choice, "--from", str(results), "-o", str(tmp_path)]
        result = CliRunner().invoke(app, command)
        assert isinstance(result.exception, MatchaError)
        assert words in str(result.exception)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fig2"], "unknown figure 'fig2'"),
        (["fig4", "--from", "nowhere.jsonl"], "cannot be read"),
        (["fig3", "--format", "gif"], "gif"),
        (["fig5"], "--data DIR or $MATCHA_DATA"),
        (["fig4", "--data", "missing"], "the data folder 'missing' does not exist"),
        (["fig4", "--from", __file__], "does not hold results: line 1 is not one"),
    ],
)
def test_one_sentence_for_bad_input(tmp_path, monkeypatch, arguments, message):
    monkeypatch.delenv("MATCHA_DATA", raising=False)
    result = CliRunner().invoke(app, [*arguments, "-o", str(tmp_path)])
    assert isinstance(result.exception, MatchaError)
    assert message in str(result.exception)


def test_results_that_are_not_text_are_refused(tmp_path):
    (tmp_path / "results.bin").write_bytes(b"\xff\xfe\x00")
    result = CliRunner().invoke(app, ["fig4", "--from", str(tmp_path / "results.bin")])
    assert isinstance(result.exception, MatchaError)
    assert "it is not text" in str(result.exception)
