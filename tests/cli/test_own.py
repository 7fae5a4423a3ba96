"""Strategies and tasks of one's own on the command line, as MODULE:OBJECT."""

from __future__ import annotations

import json

import pytest
from tests.commands import matcha_command

MINE = """
from dataclasses import dataclass

import torch
import matcha
from matcha.strategies import Periodic, Strategy, plan
from matcha.zoo.tensors import TensorTask


def often(request):
    return plan(request.topology, min(1.0, 2 * request.budget), "periodic")


@dataclass(frozen=True, kw_only=True)
class Halved(Strategy):
    name = "halved"
    about = "half of the budget"
    mixings = ("laplacian",)

    def build(self, request):
        return Periodic().build(request)


def line(num_workers, seed, batch_size=8):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(256, 3, generator=draw)
    return TensorTask(lambda: torch.nn.Linear(3, 1), x, x.sum(1, keepdim=True),
                      num_workers=num_workers, batch_size=batch_size, seed=seed,
                      loss=torch.nn.functional.mse_loss, name="line")


broken = 3
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_strategy_of_ones_own_is_planned_and_swept(here):
    for name in ("mine:often", "mine:Halved"):
        done = matcha_command("plan", "ring:4", "-b", "0.25", "-s", name, "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["budget"] == {"mine:often": 0.5, "mine:Halved": 0.25}[name]
    done = matcha_command("sweep", "ring:4", "-b", "0.25", "-s", "mine:Halved,greedy", "--json")
    assert [p["strategy"] for p in json.loads(done.stdout)["points"]] == ["halved", "greedy"]
    done = matcha_command("tune", "ring:4", "-b", "0.25", "-s", "mine:often", "--wire", "float32",
                          "--compute-time", "0.1", "--link-time", "0.1", "--json")  # fmt: skip
    assert json.loads(done.stdout)["best"]["budget"] == 0.5


def test_a_task_of_ones_own_is_simulated_and_trained(here):
    done = matcha_command(
        "simulate",
        "ring:4",
        "--task",
        "mine:line",
        "-s",
        "mine:often,silent",
        "-e",
        2,
        "--compute-time",
        0.1,
        "-o",
        here / "runs",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["strategy"] for row in rows] == ["periodic", "silent"]
    done = matcha_command("train", "mine:line", "-t", "path:2", "-e", 2, "--batch-size", 16,
                          "-o", here / "trained", "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert row["strategy"] == "greedy"
    assert row["iterations"] == 2 * 256 // (2 * 16)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["plan", "ring:4", "-s", "mine:often", "--effort", "high"], "takes no effort"),
        (["plan", "ring:4", "-s", "mine:rarely"], "could not be loaded"),
        (["plan", "ring:4", "-s", "nowhere:often"], "MODULE:OBJECT"),
        (["plan", "ring:4", "-s", "mine:broken"], "strategy"),
        (["simulate", "ring:4", "--task", "mine:broken", "-e", "1"], "not a function"),
        (
            ["simulate", "ring:4", "--task", "mine:line", "--model", "cnn", "-e", "1"],
            "no choice of",
        ),
        (["simulate", "ring:4", "--task", "mine:often", "-e", "1"], "mine:often"),
    ],
)
def test_what_is_not_there_or_does_not_fit_is_one_sentence(here, arguments, sentence):
    done = matcha_command(*arguments)
    assert done.returncode == 2, done.stderr
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
