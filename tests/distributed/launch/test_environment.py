from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import matcha
from matcha.distributed import Gossip
from matcha.distributed.launch.placement import (
    default_transport,
    is_alone,
    is_worker,
    worker_transport,
)
from matcha.errors import InputError, PackageError

LAUNCHERS = ("RANK", "WORLD_SIZE", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID")


@pytest.fixture
def nobody(monkeypatch):
    """An environment in which nothing was launched."""
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_process_of_its_own_is_alone(nobody):
    assert is_alone()
    assert not is_worker()
    with pytest.raises(InputError, match="torchrun --nproc-per-node"):
        default_transport()


@pytest.mark.parametrize("launched", [("RANK", "WORLD_SIZE"), *((name,) for name in LAUNCHERS[2:])])
def test_every_launcher_is_noticed(nobody, launched):
    for name in launched:
        nobody.setenv(name, "1")
    assert is_worker()
    assert not is_alone()


def test_mpi_without_its_package_says_what_to_install(nobody):
    nobody.setenv("PMI_RANK", "0")
    nobody.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(PackageError, match=r'pip install "matcha-sgd\[mpi\]"'):
        default_transport()


def gossip(**options):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Gossip(
        model, optimizer, matcha.plan(matcha.families.path(2), strategy="matcha"), **options
    )


def main():
    """In every worker: whoever starts the process group ends it."""
    for _ in range(2):  # and may start another
        gossip().detach()
        assert not dist.is_initialized(), "the group that Gossip started has outlived it"

    with worker_transport() as transport:
        gossip(transport=transport).detach()
        assert dist.is_initialized()
    assert not dist.is_initialized()

    dist.init_process_group("gloo")
    gossip().detach()
    assert dist.is_initialized(), "the script's own group is not ours to end"
    dist.destroy_process_group()


@pytest.mark.slow
def test_whoever_starts_the_process_group_ends_it(workers):
    workers.run("launch/test_environment.py", num_workers=2)


@pytest.mark.slow
def test_workers_that_torchrun_starts_again_seconds_apart_find_one_another(tmp_path: Path) -> None:
    """The store outlives the first attempt, whose addresses lead nowhere."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, "--max-restarts=1", __file__, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert sorted(path.name for path in tmp_path.glob("done-*")) == ["done-0", "done-1"]


def restarted(folder: Path) -> None:
    """Worker 1 fails in its first attempt, and comes late to the second."""
    rank, is_first = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if rank == "1" and not is_first:
        end = time.monotonic() + 100
        while not (folder / "came-0").exists() and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(2)  # the other is looking for this worker by now
    if rank == "0" and not is_first:
        (folder / "came-0").touch()
    with gossip(timeout=100):
        if rank == "1" and is_first:
            os._exit(1)
    (folder / f"done-{rank}").touch()


if __name__ == "__main__":
    restarted(Path(sys.argv[1])) if len(sys.argv) > 1 else main()
