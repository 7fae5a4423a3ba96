"""The simulation's benchmark runs, and what was committed meets the bars and fills the pages."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from matcha.simulation import Execution
from reproduction import page as reproduction_page

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULTS = BENCHMARKS / "results"


def script(name, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))  # what the scripts share
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def part(name, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(f"parts.{name}")


def test_a_case_is_measured(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "simulation.py"), "--only", "digits-linear"]
    output = tmp_path / "results.json"
    done = subprocess.run(
        [*command, "--repeats", "1", "--output", str(output)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "| digits-linear |" in done.stdout
    (case,) = json.loads(output.read_text())["cases"]
    assert case["loop"] > 0
    assert case["engine"]["auto"] > 0


@pytest.mark.parametrize("name", ["simulation_h200.json", "simulation_cpu.json"])
def test_the_committed_results_meet_every_bar(name):
    cases = json.loads((RESULTS / name).read_text())["cases"]
    for case in cases:
        for value, bar in (("times_loop", "bar_loop"), ("share_of_whole", "bar_whole")):
            if case[bar] is not None:
                assert case[value] >= case[bar], case
    assert sum(case["bar_loop"] is not None for case in cases) >= 4


def test_the_tables_of_the_page_are_the_committed_results(monkeypatch):
    benchmark = script("simulation", monkeypatch)
    page = (BENCHMARKS.parent / "docs" / "simulation.md").read_text()
    for name in ("simulation_h200.json", "simulation_cpu.json"):
        assert benchmark.table(json.loads((RESULTS / name).read_text())["cases"]) in page


def test_the_check_of_devices_measures_how_far_they_are_apart(monkeypatch):
    """What a GPU is held to against the CPU's float32, here finer numbers and coarser ones."""
    check = part("agreement", monkeypatch)
    for name, overlap in (("resnet8", False), ("lstm", True)):
        near = check.compare(name, overlap, Execution(precision="float64"))
        assert near["agrees"], near
    far = check.compare("lstm", True, Execution(precision="bfloat16"))  # resnet8 would take long
    assert 0 < near["worst"]["train_loss"] < far["worst"]["train_loss"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_captured_engine_agrees_with_the_cpu(monkeypatch):
    for result in part("agreement", monkeypatch).agreement(Execution(device="cuda", streams=4)):
        assert result["agrees"], result


def test_the_reproduction_page_is_written_from_the_committed_results():
    written = reproduction_page.PAGE.read_text(encoding="utf-8")
    assert reproduction_page.page() == written
