from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.commands import matcha_command
from tests.quadratics import write_quadratic_run

import matcha


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for strategy in ("vanilla", "periodic"):
        plan = matcha.plan(matcha.families.ring(4), 0.5, strategy)
        write_quadratic_run(root / strategy, plan, iterations=60)
    return root


def test_a_page_is_written_once_and_again_only_with_force(runs, tmp_path):
    page = tmp_path / "report.html"
    done = matcha_command("report", runs, "-o", page)
    assert done.returncode == 0, done.stderr
    assert "wrote" in done.stdout
    again = matcha_command("report", runs, "-o", page)
    assert again.returncode == 2
    assert "--force" in again.stderr


def test_the_comparison_comes_as_json(runs, tmp_path):
    page = tmp_path / "report.html"
    done = matcha_command("report", runs, "-o", page, "--json")
    document = json.loads(done.stdout)
    assert [row["strategy"] for row in document["rows"]] == ["vanilla", "periodic"]
    assert document["written"] == [str(page)]


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_figures_for_papers(runs, tmp_path, ending):
    done = matcha_command("report", runs, "--format", ending, "-o", tmp_path / "figures")
    assert done.returncode == 0, done.stderr
    magic = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[ending]
    written = sorted((tmp_path / "figures").iterdir())
    names = {path.stem for path in written}
    assert {"train_loss-epoch", "train_loss-time", "consensus", "workers"} <= names
    assert {"topology-vanilla", "timeline-periodic"} <= names
    assert all(path.read_bytes().startswith(magic) for path in written)


def test_figures_that_cannot_be_written_there_are_written_elsewhere(runs, tmp_path):
    (tmp_path / "train_loss-time.svg").mkdir()  # a folder stands where a figure should
    command = ("report", runs, "--format", "svg", "-o", tmp_path, "--force", "--json")
    done = matcha_command(*command, TMPDIR=str(tmp_path))
    assert done.returncode != 0
    assert "cannot write" in done.stderr
    written = [Path(path) for path in json.loads(done.stdout)["written"]]
    assert str(written[0].parent) in done.stderr
    assert "train_loss-time.svg" in {path.name for path in written if path.stat().st_size}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [(["nowhere"], "holds no run"), (["nowhere", "--format", "docx"], "unknown format")],
)
def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path, arguments, sentence):
    done = matcha_command("report", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_a_plan_can_be_explored(tmp_path):
    plan = tmp_path / "plan.json"
    matcha.plan(matcha.families.ring(4), 0.5, "matcha").save(plan)
    done = matcha_command("report", plan, "-o", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    assert "ring:4" in (tmp_path / "page.html").read_text(encoding="utf-8")
    refused = matcha_command("report", plan, "--format", "svg", "-o", tmp_path / "figures")
    assert refused.returncode == 2
    assert "need runs" in refused.stderr


def test_a_staged_plan_can_be_explored(staged_file, tmp_path):
    page = tmp_path / "plan.html"
    done = matcha_command("report", staged_file, "-o", page)
    assert done.returncode == 0, done.stderr
    assert "ring:3" in page.read_text(encoding="utf-8")
