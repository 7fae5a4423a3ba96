"""The cases of `cases.py` on GPUs: shared over gloo, one a worker over NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distributed import cases

GPUS = torch.cuda.device_count()


@pytest.mark.slow
@pytest.mark.skipif(GPUS < 1, reason="needs an NVIDIA GPU, and PyTorch sees none here")
def test_workers_that_share_a_gpu_equal_the_definition(workers, tmp_path: Path) -> None:
    workers.run("cases.py", "gpu", str(tmp_path), num_workers=cases.NUM_WORKERS, timeout=250)
    cases.check_folder("gpu", tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(
    GPUS < cases.NUM_WORKERS,
    reason=f"NCCL wants a GPU a worker: {cases.NUM_WORKERS} are needed, {GPUS} are here",
)
def test_every_case_over_nccl_equals_the_definition(workers, tmp_path: Path) -> None:
    workers.run("cases.py", "nccl", str(tmp_path), num_workers=cases.NUM_WORKERS, timeout=250)
    cases.check_folder("nccl", tmp_path)
