"""Gossip under the real frameworks, two processes each, and controls that must drift apart."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCE = HERE.parents[2] / "src"


def run_itself(folder: Path) -> None:
    """Lightning starts the second process by itself."""
    done = subprocess.run(
        [sys.executable, str(HERE / "scripts.py"), "lightning", str(folder)],
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]


@pytest.mark.long("Accelerate, Lightning and Transformers")
@pytest.mark.parametrize(
    ("framework", "model", "iterations"),
    [
        ("accelerate", "Sequential", 6),
        ("transformers", "Model", 6),
        ("lightning", "Module", 12),
    ],
)
def test_gossip_trains_saves_and_loads_in(
    framework: str, model: str, iterations: int, workers, tmp_path: Path
) -> None:
    if importlib.util.find_spec(framework) is None:  # importing it here would take seconds
        pytest.skip(f"needs {framework}")
    if framework == "lightning":
        run_itself(tmp_path)
    else:
        script = "integrations/scripts.py"
        workers.run(script, framework, str(tmp_path), num_workers=2, timeout=250)
    for rank in range(2):
        found = json.loads((tmp_path / f"found-{rank}.json").read_text())
        assert found["class"] == model  # and not DistributedDataParallel
        assert found["iteration"] == iterations
        # Lightning's script overlaps, so the last step's difference is still there.
        assert found["drift"] < (0.05 if framework == "lightning" else 1e-5)
        assert found["control"] > 0.05  # without exchanges
        assert found["restored"]
        if framework == "lightning":
            assert found["tested"]  # `trainer.test` after `fit` sees the average
        if framework == "transformers":
            assert found["resumed"]  # to the same bits, every worker its own
            assert found["resumed_apart"] > 1e-4
        assert found["size"] == pytest.approx(1, abs=0.01)
