"""What can happen to a team of real processes, and that it neither hangs nor loses work."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch
from tests.distributed import faults

from matcha.distributed.checkpoint import checkpoints
from matcha.testing import run_threads

OTHERS = [rank for rank in range(faults.NUM_WORKERS) if rank != faults.VICTIM]


@pytest.fixture(scope="module")
def answer() -> list[torch.Tensor]:
    """What an undisturbed run gives."""
    return run_threads(faults.NUM_WORKERS, faults.train)


def wait_for_progress(folder: Path, rank: int, iterations: int) -> None:
    file = folder / f"progress-{rank}"
    end = time.monotonic() + 150
    while not file.exists() or int(file.read_text() or 0) < iterations:
        assert time.monotonic() < end, "the workers do not get on"
        time.sleep(0.02)


@pytest.mark.slow
def test_a_killed_worker_is_named_and_training_resumes_to_the_same_bits(
    workers, tmp_path: Path, answer
) -> None:
    run = workers.start("faults.py", "kill", str(tmp_path), num_workers=faults.NUM_WORKERS)
    codes = run.wait(timeout=200, grace=25)
    assert codes[faults.VICTIM] == -signal.SIGKILL
    texts = workers.texts()
    for rank in OTHERS:
        assert codes[rank] == 3, texts[rank]
        sentence = texts[rank].splitlines()[-1].split(maxsplit=1)[1]
        assert sentence.startswith(f"rank {faults.VICTIM} (host "), sentence
        assert sentence.count(". ") == 0
    # All of them within the timeout of the first.
    times = [float(texts[rank].splitlines()[-1].split()[0]) for rank in OTHERS]
    assert max(times) - min(times) < 20

    (kept,) = checkpoints(tmp_path / "saved")
    kept.check(*kept.files)
    assert kept.iteration == faults.SAVED_AT

    # On the way, one worker is stopped for less than the timeout: nothing changes.
    run = workers.start("faults.py", "resume", str(tmp_path), num_workers=faults.NUM_WORKERS)
    wait_for_progress(tmp_path, 1, faults.SAVED_AT + 2)
    run.processes[1].send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    run.processes[1].send_signal(signal.SIGCONT)
    assert run.wait(timeout=200) == [0] * faults.NUM_WORKERS, workers.texts()
    for rank, expected in enumerate(answer):
        assert torch.equal(torch.load(tmp_path / f"result-{rank}.pt", weights_only=True), expected)


@pytest.mark.slow
def test_a_worker_stopped_for_longer_than_the_timeout_is_named(workers, tmp_path: Path) -> None:
    run = workers.start("faults.py", "stop", str(tmp_path), num_workers=faults.NUM_WORKERS)
    wait_for_progress(tmp_path, faults.VICTIM, 4)
    stopped = run.processes[faults.VICTIM]
    stopped.send_signal(signal.SIGSTOP)
    end = time.monotonic() + 150
    while any(run.processes[rank].poll() is None for rank in OTHERS):
        assert time.monotonic() < end, "the others hang"
        time.sleep(0.05)
    run.stop()
    for rank in OTHERS:
        assert run.processes[rank].poll() == 3
        assert f"rank {faults.VICTIM} (host " in workers.texts()[rank]


@pytest.mark.slow
def test_a_worker_with_another_plan_model_or_seed_is_refused_at_the_start(
    workers, tmp_path: Path
) -> None:
    texts = workers.run("faults.py", "confuse", str(tmp_path), num_workers=faults.NUM_WORKERS)
    for text in texts:
        plan, model, seed = text.splitlines()[-3:]
        assert all(line.count("rank 1 (host ") >= 1 for line in (plan, model, seed))
        assert "another plan" in plan
        assert "another model" in model
        assert "another seed ('2', others '1')" in seed
    # The same processes then trained: workers out of reach of a slow one ran ahead of it.
    assert all((tmp_path / f"finished-{rank}").exists() for rank in range(faults.NUM_WORKERS))
