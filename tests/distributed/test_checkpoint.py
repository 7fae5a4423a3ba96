from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed import cases
from torch import nn

import matcha
from matcha.distributed import Gossip, checkpoint, snapshot
from matcha.distributed.checkpoint import SCHEMA, checkpoints
from matcha.distributed.launch.placement import Placement
from matcha.distributed.transports.collectives import gather
from matcha.errors import DataError, ExchangeError, InputError, WriteError
from matcha.plans import Plan
from matcha.testing import MemoryNetwork, MemoryTransport, run_threads

PLAN = cases.make_plan("matcha", "laplacian")
SMALL = 4


def small_plan() -> Plan:
    from matcha import families, plan

    return plan(families.ring(SMALL), 1.0, "vanilla")


class Worker:
    """A model with dropout and BatchNorm, so that random state and buffers matter."""

    def __init__(self, transport: MemoryTransport, plan: Plan, kind: type, overlap: bool) -> None:
        self.random = torch.Generator().manual_seed(100 + transport.rank)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
        extra = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        self.optimizer = kind(self.model.parameters(), lr=0.05, **extra)
        self.gossip = Gossip(
            self.model, self.optimizer, plan, transport=transport, timeout=20, overlap=overlap
        )
        self.generators = {"data": self.random}

    def train(self, steps: int) -> None:
        for _ in range(steps):
            batch = torch.randn(8, 4, generator=self.random)
            self.optimizer.zero_grad()
            self.model(batch).square().mean().backward()
            self.optimizer.step()

    def state(self) -> list[torch.Tensor]:
        self.gossip.state.settle()
        tensors = [*self.model.parameters(), *self.model.buffers()]
        for state in self.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        return [tensor.detach().clone() for tensor in tensors]


def everywhere(work: Any, plan: Plan = PLAN, kind: type = torch.optim.SGD, overlap=False) -> list:
    return run_threads(plan.num_workers, lambda t: work(Worker(t, plan, kind, overlap)))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_resuming_continues_to_the_same_bits(tmp_path: Path, kind, overlap) -> None:
    def uninterrupted(worker: Worker) -> list[torch.Tensor]:
        worker.train(5)
        worker.gossip.save(tmp_path, extra={"epoch": 2.5}, generators=worker.generators)
        worker.train(6)
        return worker.state()

    def resumed(worker: Worker) -> list[torch.Tensor]:
        worker.train(2)  # whatever happened before loading is forgotten
        extra = worker.gossip.load(tmp_path, generators=worker.generators)
        assert extra == {"epoch": 2.5}
        assert worker.gossip.iteration == 5
        worker.train(6)
        return worker.state()

    for left, right in zip(
        everywhere(uninterrupted, kind=kind, overlap=overlap),
        everywhere(resumed, kind=kind, overlap=overlap),
        strict=True,
    ):
        assert len(left) == len(right)
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Checkpoints of iterations 2 and 4; the one of iteration 1 has been cleared away."""

    def work(worker: Worker) -> None:
        for steps in (1, 1, 2):
            worker.train(steps)
            worker.gossip.save(tmp_path, generators=worker.generators)

    everywhere(work)
    assert [info.iteration for info in checkpoints(tmp_path)] == [2, 4]
    return tmp_path


def refused(folder: Path, kind: type[Exception], sentence: str, plan: Plan = PLAN, **options):
    def work(worker: Worker) -> None:
        with pytest.raises(kind, match=sentence):
            worker.gossip.load(folder, **options)

    everywhere(work, plan)


def test_a_truncated_checkpoint_is_refused_and_the_one_before_offered(saved: Path) -> None:
    file = saved / "iteration-000000004" / "worker-003.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    refused(saved, DataError, r"worker-003.* is truncated.*before, iteration 2, is intact")
    everywhere(lambda worker: worker.gossip.load(saved, iteration=2))


def test_a_damaged_checkpoint_is_refused_by_all_workers(saved: Path) -> None:
    file = saved / "iteration-000000004" / "worker-003.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    refused(saved, DataError, r"worker-003.* is damaged")
    (saved / "iteration-000000002" / "worker-000.safetensors").unlink()
    refused(saved, DataError, "no intact one before")


def test_an_unfinished_checkpoint_does_not_count(saved: Path) -> None:
    (saved / "iteration-000000004" / "complete.json").unlink()  # as when killed while saving

    def work(worker: Worker) -> int:
        worker.gossip.load(saved)
        return worker.gossip.iteration

    assert set(everywhere(work)) == {2}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"kind": torch.optim.AdamW}, r"another optimizer \(SGD, and now it is AdamW\)"),
        ({"momentum": "shared"}, r"another momentum \(local, and now it is shared\)"),
        ({"wire": "modulo:3"}, r"another wire \(float32, and now it is modulo:3\).*wire='float32'"),
    ],
)
def test_what_a_state_depends_on_must_be_as_it_was(tmp_path: Path, changes, sentence) -> None:
    def worker(transport, kind=torch.optim.SGD, momentum="local", wire="float32") -> Gossip:
        model = nn.Linear(3, 1)
        options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        optimizer = kind(model.parameters(), lr=0.1, **options)
        chosen = matcha.plan(matcha.families.ring(SMALL), 1.0, "matcha", wire=wire)
        gossip = Gossip(
            model, optimizer, chosen, transport=transport, momentum=momentum, timeout=20
        )
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return gossip

    run_threads(SMALL, lambda transport: worker(transport).save(tmp_path))

    def load(transport) -> None:
        with pytest.raises(InputError, match=sentence):
            worker(transport, **changes).load(tmp_path)

    run_threads(SMALL, load)


def test_no_checkpoint_is_refused(saved: Path, tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", DataError, "no complete checkpoint")
    refused(saved, DataError, "no complete checkpoint of iteration 3", iteration=3)


def test_another_plan_or_team_is_refused_unless_averaging(saved: Path) -> None:
    refused(saved, InputError, "another plan.*average=True", cases.make_plan("vanilla", "pairwise"))
    refused(saved, InputError, "8 workers, but there are 4.*average=True", small_plan())

    from safetensors.torch import load_file

    files = sorted((saved / "iteration-000000004").glob("*.safetensors"))
    mean = torch.stack([load_file(f)["model/0.weight"].double() for f in files]).mean(0)

    def work(worker: Worker) -> torch.Tensor:
        worker.gossip.load(saved, average=True)
        assert worker.gossip.iteration == 4
        assert not worker.optimizer.state
        start = worker.model[0].weight.detach().clone()
        worker.train(2)
        return start

    for start in everywhere(work, small_plan()):
        assert torch.allclose(start.double(), mean, atol=1e-7)


def test_another_model_is_refused(saved: Path) -> None:
    def work(transport: MemoryTransport) -> None:
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gossip = Gossip(model, optimizer, PLAN, transport=transport, timeout=20)
        with pytest.raises(InputError, match="another model"):
            gossip.load(saved)
        with pytest.raises(InputError, match="another layout_digest"):
            gossip.load_state_dict({**gossip.state_dict(), "layout_digest": "?"})
        state = {**gossip.state_dict(), "iteration": 12}
        gossip.load_state_dict(json.loads(json.dumps(state)))
        assert gossip.iteration == 12

    run_threads(8, work)


@pytest.mark.parametrize("content", ["", '{"schema": "matcha.checkp', "[]", "{}", "\0" * 40])
def test_a_damaged_list_does_not_hide_intact_checkpoints(saved: Path, content) -> None:
    manifest = saved / "iteration-000000004" / "complete.json"
    manifest.write_text(content)

    def work(worker: Worker) -> int:
        worker.gossip.load(saved)
        return worker.gossip.iteration

    assert set(everywhere(work)) == {2}
    manifest.write_text(json.dumps({"schema": SCHEMA, "iteration": 4}))
    assert [info.iteration for info in checkpoints(saved)] == [2]


def test_a_list_with_a_flipped_bit_does_not_count(saved: Path) -> None:
    """It made 40 of 48, and training went on at an iteration that it had never come to."""
    manifest = saved / "iteration-000000004" / "complete.json"
    manifest.write_text(manifest.read_text().replace('"num_workers": 8', '"num_workers": 9'))
    assert [info.iteration for info in checkpoints(saved)] == [2]


def test_what_a_killed_worker_left_behind_is_removed(saved: Path) -> None:
    """Parts of files under temporary names, and folders that were never finished."""
    name = "worker-003.safetensors"
    unfinished = saved / "iteration-000000003"
    unfinished.mkdir()
    left = [saved / "iteration-000000002" / f".{name}.new.x1y2.partial"]
    left += [unfinished / f"{name}.new", unfinished / ".complete.json.x1y2.partial"]
    for file in left:
        file.touch()

    def work(worker: Worker) -> None:
        worker.gossip.load(saved)
        worker.gossip.save(saved, keep=3)

    everywhere(work)
    assert not unfinished.exists()
    assert not [file for file in left if file.exists()]
    assert [info.iteration for info in checkpoints(saved)] == [2, 4]


@pytest.mark.parametrize(
    "changes",
    [
        {"iteration": "4"},
        {"iteration": 5},  # and the folder says 4
        {"iteration": -4},
        {"num_workers": None},
        {"plan_digest": 3},
        {"files": {"../../secret": [1, 1]}},
        {"files": {"worker-000.safetensors": ["all", 1]}},
    ],
)
def test_a_list_that_makes_no_sense_does_not_count(saved: Path, changes) -> None:
    """Lists are read before anything is checked by a checksum, and name files."""
    manifest = saved / "iteration-000000004" / "complete.json"
    document = json.loads(manifest.read_text())
    del document["checksum"]  # as 0.2 wrote it
    manifest.write_text(json.dumps(document))
    assert [info.iteration for info in checkpoints(saved)] == [2, 4]
    manifest.write_text(json.dumps(document | changes))
    assert [info.iteration for info in checkpoints(saved)] == [2]


def test_a_list_of_files_is_on_the_disk_before_it_counts(tmp_path: Path, monkeypatch) -> None:
    """Everything is synced under its temporary name, and the folder after each rename."""
    synced: list[str] = []
    sync = os.fsync

    def record(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    everywhere(lambda worker: worker.gossip.save(tmp_path), small_plan())
    folder = tmp_path / "iteration-000000000"
    assert sum(".complete.json." in name for name in synced) == SMALL
    assert sum(".safetensors." in name for name in synced) == SMALL
    assert synced.count(str(folder)) == 2 * SMALL
    assert [info.iteration for info in checkpoints(tmp_path)] == [0]


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize("name", ["write_snapshot", "save_document"])
def test_who_cannot_write_says_so_to_everybody(
    saved: Path, monkeypatch, failing: int, name: str
) -> None:
    """A full disk on one worker: the others would wait for the timeout, and longer."""
    write = getattr(checkpoint, name)
    mine = threading.local()

    def full(*arguments) -> None:
        if mine.rank == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(*arguments)

    monkeypatch.setattr(checkpoint, name, full)

    def work(worker: Worker) -> None:
        mine.rank = worker.gossip.rank
        worker.train(5)
        with pytest.raises(WriteError, match=rf"rank {failing}.* could not .*No space left"):
            worker.gossip.save(saved)

    everywhere(work)
    monkeypatch.undo()
    assert [i.iteration for i in checkpoints(saved)][:2] == [2, 4]  # what was there stays
    everywhere(lambda worker: worker.gossip.load(saved, iteration=4))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of a megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if os.name != "posix" or os.geteuid() or subprocess.run(mount, check=False).returncode:
        pytest.skip("a small disk can be mounted by root on Linux only")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_fills_leaves_the_last_checkpoint_whole(
    small_disk: Path, tmp_path: Path
) -> None:
    filler = small_disk / "filler"

    def work(worker: Worker) -> None:
        full = worker.gossip.rank == 2
        folder = small_disk if full else tmp_path / f"host-{worker.gossip.rank}"
        worker.train(1)
        worker.gossip.save(folder)
        if full:
            with filler.open("wb", buffering=0) as file, suppress(OSError):
                while True:
                    file.write(bytes(1 << 12))
        worker.train(1)
        with pytest.raises(WriteError, match=r"rank 2.* could not .*No space left"):
            worker.gossip.save(folder)
        filler.unlink(missing_ok=True)
        worker.train(1)
        worker.gossip.save(folder)
        assert [info.iteration for info in checkpoints(folder)] == [1, 3]

    everywhere(work, small_plan())


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    """A folder a host, two workers each; checkpoints of iterations 2 and 4 on all of them."""

    def work(worker: Worker) -> None:
        for steps in (1, 1, 2):
            worker.train(steps)
            worker.gossip.save(host(tmp_path, worker), generators=worker.generators)

    everywhere(work)
    return tmp_path


def host(root: Path, worker: Worker) -> Path:
    return root / f"host-{worker.gossip.rank // 2}"


def test_each_host_clears_old_checkpoints_away(hosts: Path) -> None:
    for number in range(4):
        folder = hosts / f"host-{number}"
        kept = ["iteration-000000002", "iteration-000000004"]
        assert sorted(path.name for path in folder.iterdir()) == kept
        names = [f"worker-{rank:03d}.safetensors" for rank in (2 * number, 2 * number + 1)]
        for path in folder.iterdir():
            assert sorted(file.name for file in path.iterdir()) == ["complete.json", *names]


def test_workers_load_the_newest_checkpoint_that_all_have(hosts: Path) -> None:
    shutil.rmtree(hosts / "host-1" / "iteration-000000004")  # lost, or never copied there

    def work(worker: Worker) -> int:
        worker.gossip.load(host(hosts, worker), generators=worker.generators)
        return worker.gossip.iteration

    assert set(everywhere(work)) == {2}
    # The same iteration of another run is another checkpoint.
    manifest = hosts / "host-1" / "iteration-000000002" / "complete.json"
    manifest.write_text(manifest.read_text().replace('"identity": null', '"identity": {}'))

    def refused_everywhere(worker: Worker) -> None:
        with pytest.raises(DataError, match="no complete checkpoint"):
            worker.gossip.load(host(hosts, worker))

    everywhere(refused_everywhere)
    shutil.rmtree(hosts / "host-1")

    def lost(worker: Worker) -> None:
        with pytest.raises(DataError, match=r"every worker has; rank 2 .*has none"):
            worker.gossip.load(host(hosts, worker))

    everywhere(lost)


def test_a_smaller_team_clears_a_larger_ones_files_away(saved: Path) -> None:
    def work(worker: Worker) -> None:
        worker.gossip.load(saved, average=True)
        for _ in range(2):
            worker.train(1)
            worker.gossip.save(saved)

    everywhere(work, small_plan())
    assert sorted(path.name for path in saved.iterdir()) == [
        "iteration-000000005",
        "iteration-000000006",
    ]


def test_workers_at_different_iterations_save_nothing(saved: Path) -> None:
    """Each wrote a folder of its own; nothing loaded them, and older ones were deleted."""
    before = sorted(saved.rglob("*"))

    def work(worker: Worker) -> int:
        worker.gossip.state.cursor.seek(100 + worker.gossip.rank)  # as if saving went by a clock
        with pytest.raises(ExchangeError, match=r"rank 0.* is at iteration 100 and rank 7.* is at"):
            worker.gossip.save(saved, keep=1)
        worker.gossip.load(saved)
        return worker.gossip.iteration

    assert everywhere(work) == [4] * PLAN.num_workers
    assert sorted(saved.rglob("*")) == before


def test_the_last_that_loads_stays_while_a_worker_is_away(saved: Path, monkeypatch) -> None:
    """One that lacks a worker's file does not load for all: it replaces none that does."""

    def work(worker: Worker) -> None:
        worker.train(1)
        worker.gossip.load(saved)
        for _ in range(3):
            worker.train(1)
            worker.gossip.save(saved, keep=1)

    def without_the_last(gossip, deed, work, kind=DataError):
        found = together(gossip, deed, work, kind)
        return found[:-1] if "write its part" in deed else found

    together = checkpoint.together
    monkeypatch.setattr(checkpoint, "together", without_the_last)
    everywhere(work)
    assert [(info.iteration, info.is_whole) for info in checkpoints(saved)] == [
        (4, True),
        (7, False),
    ]
    monkeypatch.undo()
    refused(saved, DataError, "worker 7 was away when that of iteration 7 was", iteration=7)

    def resume(worker: Worker) -> int:
        worker.gossip.load(saved)
        return worker.gossip.iteration

    assert everywhere(resume) == [4] * PLAN.num_workers


def test_parts_of_workers_load_the_same_iteration(tmp_path: Path, monkeypatch) -> None:
    """Two workers of two processes: what one part lacks, none loads."""
    everyone, teams = MemoryNetwork(4), [MemoryNetwork(2), MemoryNetwork(2)]
    plan = matcha.plan(matcha.families.path(2), 1.0, "vanilla")
    placements = threading.local()
    monkeypatch.setattr("matcha.distributed.gossip.find_placement", lambda *_: placements.mine)

    def process(all_of_them: MemoryTransport) -> int:
        part = all_of_them.rank % 2
        counterparts = teams[part].transport(all_of_them.rank // 2)
        placements.mine = Placement(
            transport=counterparts,
            everyone=everyone.transport(all_of_them.rank),
            part=part,
            num_parts=2,
        )
        worker = Worker(counterparts, plan, torch.optim.SGD, overlap=False)
        for _ in range(2):
            worker.train(1)
            worker.gossip.save(tmp_path)
        gather(all_of_them, b"saved", 30)
        if all_of_them.rank == 0:
            shutil.rmtree(tmp_path / "part-001" / "iteration-000000002")
        gather(all_of_them, b"removed", 30)
        worker.gossip.load(tmp_path)
        return worker.gossip.iteration

    assert run_threads(4, process) == [1, 1, 1, 1]


def test_a_checkpoint_is_not_damaged_by_one_that_replaces_it(saved: Path, monkeypatch) -> None:
    """After loading, scripts save the same iteration again: a full disk then cost the only one."""
    write = snapshot.write_snapshot

    def failing(path, state, extra, generators) -> None:
        if state.rank == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, state, extra, generators)

    def work(worker: Worker) -> None:
        worker.gossip.load(saved)
        with pytest.raises(WriteError, match=r"rank 3 .*No space left"):
            worker.gossip.save(saved, extra={"again": True})
        assert worker.gossip.load(saved) == {}
        assert worker.gossip.iteration == 4

    monkeypatch.setattr(checkpoint, "write_snapshot", failing)
    everywhere(work)
    monkeypatch.undo()

    def again(worker: Worker) -> None:
        worker.gossip.load(saved)
        worker.gossip.save(saved, extra={"again": True})
        assert worker.gossip.load(saved) == {"again": True}

    everywhere(again)
    assert not list(saved.rglob("*.new"))
