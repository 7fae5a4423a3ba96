"""What torchrun's users get when a rank dies: all are started again, and resume.

As a script: `test_torchrun.py FOLDER`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import matcha
from matcha.distributed import Gossip
from matcha.distributed.checkpoint import checkpoints

SAVED_AT, KILLED_AT, ITERATIONS = 4, 7, 10


@pytest.mark.slow
@pytest.mark.long("torchrun's processes import torch; test_faults.py kills and resumes without it")
def test_torchrun_starts_all_again_and_they_resume(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

    def run(restarts: int) -> subprocess.CompletedProcess[str]:
        command = [*torchrun, f"--max-restarts={restarts}", __file__, str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, timeout=250)

    ended = run(0)
    assert ended.returncode == 1
    assert "Signal 9 (SIGKILL)" in ended.stderr  # of torchrun's own table of who failed
    assert not list(tmp_path.glob("done-*"))

    (tmp_path / "killed").unlink()
    resumed = run(1)
    assert resumed.returncode == 0, resumed.stderr[-4000:]
    texts = {path.name: path.read_text() for path in tmp_path.glob("done-*")}
    assert texts == {f"done-{rank}": f"{SAVED_AT} to {ITERATIONS}" for rank in (0, 1)}


def main(folder: Path) -> None:
    plan = matcha.plan(matcha.families.path(2), 1.0, "vanilla")
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Gossip(model, optimizer, plan) as gossip:
        if checkpoints(folder / "saved"):
            gossip.load(folder / "saved")
        started = gossip.iteration
        while gossip.iteration < ITERATIONS:
            if gossip.iteration == SAVED_AT:
                gossip.save(folder / "saved")
            dies = gossip.rank == 1 and gossip.iteration == KILLED_AT
            if dies and not (folder / "killed").exists():
                (folder / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        (folder / f"done-{gossip.rank}").write_text(f"{started} to {gossip.iteration}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
