"""Gossip under the real frameworks, two processes each, and controls that must drift apart."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SOURCE = HERE.parents[2] / "src"


def run(framework: str, folder: Path, *control: str) -> list[dict[str, Any]]:
    pytest.importorskip(framework, reason=f"needs {framework}")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, str(HERE / "scripts.py"), framework, str(folder), *control]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
                   "CUDA_VISIBLE_DEVICES": ""}  # fmt: skip
    if framework != "lightning":  # which starts the second process by itself
        launcher = ["-m", "torch.distributed.run", f"--master-port={port}", "--nproc-per-node=2"]
        command = [sys.executable, *launcher, *command[1:]]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env=environment, cwd=folder
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.timeout(250)
@pytest.mark.parametrize(
    ("framework", "model", "iterations"),
    [
        ("accelerate", "Sequential", 6),
        ("transformers", "Model", 6),
        ("lightning", "Module", 12),
    ],
)
def test_gossip_trains_saves_and_loads_in(
    framework: str, model: str, iterations: int, tmp_path: Path
) -> None:
    for found in run(framework, tmp_path):
        assert found["class"] == model  # and not DistributedDataParallel
        assert found["iteration"] == iterations
        # Lightning's script overlaps, so the last step's difference is still there.
        assert found["drift"] < (0.05 if framework == "lightning" else 1e-5)
        assert found["restored"]
        assert found["size"] == pytest.approx(1, abs=0.01)


@pytest.mark.slow
@pytest.mark.timeout(250)
@pytest.mark.parametrize("framework", ["accelerate", "transformers", "lightning"])
def test_without_exchanges_workers_drift_apart_in(framework: str, tmp_path: Path) -> None:
    for found in run(framework, tmp_path, "control"):
        assert found["drift"] > 0.05
