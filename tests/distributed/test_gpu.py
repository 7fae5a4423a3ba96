"""The cases of `cases.py` on GPUs: shared over gloo, one per worker over NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.distributed import cases

GPUS = torch.cuda.device_count()


@pytest.mark.slow
@pytest.mark.skipif(GPUS < 1, reason="needs an NVIDIA GPU, and PyTorch sees none here")
def test_workers_that_share_a_gpu_equal_the_definition(workers, tmp_path: Path) -> None:
    cases.write_plans(tmp_path)
    workers.run("cases.py", "gpu", str(tmp_path), num_workers=cases.NUM_WORKERS, timeout=250)
    cases.check_folder("gpu", tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(GPUS < 2, reason=f"NCCL wants a GPU a worker, so two or more; {GPUS} here")
def test_every_case_over_nccl_equals_the_definition(workers, tmp_path: Path) -> None:
    num_workers = min(GPUS, cases.NUM_WORKERS)
    cases.write_plans(tmp_path, num_workers)
    workers.run("cases.py", "nccl", str(tmp_path), num_workers=num_workers, timeout=250)
    cases.check_folder("nccl", tmp_path, num_workers)
