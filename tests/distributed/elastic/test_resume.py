"""A team that continues and a checkpoint: who comes late, and who was away when it was written."""

from __future__ import annotations

import threading

import pytest
import torch
from tests.distributed.links.linked import local_peers, run_linked, vanish

from matcha import families, plan
from matcha.distributed import Gossip, LinkTransport, checkpoint
from matcha.distributed.checkpoint import checkpoints
from matcha.distributed.train import Network, run_worker
from matcha.errors import DataError
from matcha.simulation import Constant, Settings
from matcha.training.jobs import Job
from matcha.zoo.recipes import Choices, recipe

RING = families.ring(4)
PLAN = plan(RING, 1.0, "matcha")
LOST, END = 8, 20


class Worker:
    """A model with momentum under Gossip, in a team that continues."""

    def __init__(self, transport, on_loss="continue", momentum="local") -> None:
        self.transport = transport
        self.model = torch.nn.Linear(3, 1, dtype=torch.float64)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.gossip = Gossip(
            self.model,
            self.optimizer,
            PLAN,
            transport=transport,
            timeout=20,
            on_loss=on_loss,
            momentum=momentum,
        )

    def run(self, stop: int) -> None:
        goal = float(self.transport.rank)
        while self.gossip.iteration < stop:
            self.optimizer.zero_grad()
            (self.model(torch.eye(3, dtype=torch.float64)) - goal).square().mean().backward()
            self.optimizer.step()

    def tend_until(self, event: threading.Event) -> None:
        for _ in range(30_000):
            self.gossip.membership.tend()
            if event.wait(0.002):
                return
        raise AssertionError("it did not come to pass")

    def values(self) -> list[float]:
        weights = torch.cat([p.detach().flatten() for p in self.model.parameters()])
        velocity = [s["momentum_buffer"].flatten() for s in self.optimizer.state.values()]
        return torch.cat([weights, *velocity]).tolist()


class KilledError(BaseException):
    """Nothing of ours catches it."""


def save(folder, **options) -> None:
    """Write a checkpoint of all four at iteration 4."""

    def work(transport):
        worker = Worker(transport, **options)
        worker.run(4)
        worker.gossip.save(folder, extra={"epoch": 1})
        worker.gossip.detach()

    run_linked(RING, work)


@pytest.mark.parametrize("momentum", ["local", "quasi-global", "shared"])
def test_the_script_of_a_worker_that_comes_back_may_resume_too(tmp_path, momentum) -> None:
    """The script of a worker that is started again resumes as that of all did: nobody waits."""
    save(tmp_path, momentum=momentum)
    peers = local_peers(4)
    arrived, back = threading.Barrier(4), threading.Event()

    def work(transport):
        worker = Worker(transport, momentum=momentum)
        assert worker.gossip.load(tmp_path) == {"epoch": 1}
        worker.run(LOST)
        worker.gossip.membership.carry(lambda: {"epoch": 2}, lambda _: None)
        arrived.wait(60)
        if transport.rank == 2:
            vanish(transport)
            transport = LinkTransport(RING, 2, peers, timeout=90.0, start_timeout=60.0)
            worker = Worker(transport, momentum=momentum)
            assert worker.gossip.iteration == LOST
            before = worker.values()
            assert worker.gossip.load(tmp_path) == {"epoch": 2}
            assert (worker.gossip.iteration, worker.values()) == (LOST, before)
            back.set()
        else:
            worker.tend_until(back)
        worker.run(END)
        # From its first step on a call of all is one of all again: back to the checkpoint.
        worker.gossip.load(tmp_path)
        assert worker.gossip.iteration == 4
        worker.run(LOST)
        distance = worker.gossip.consensus_distance()
        worker.gossip.detach()
        transport.close()
        return round(distance, 9)

    assert len(set(run_linked(RING, work, peers=peers))) == 1


def test_a_worker_of_a_resumed_run_comes_back(tmp_path) -> None:
    """It is started again by the same command, `--resume` included."""
    peers = local_peers(4)
    choices = Choices(num_workers=4, num_train=160, num_test=40, batch_size=8)
    spec = recipe("logistic").spec(choices)
    away = threading.Event()

    def job(epochs: int) -> Job:
        settings = Settings(
            epochs=epochs,
            schedule=Constant(base=0.02),
            optimizer=recipe("logistic").optimizer,
        )
        return Job(directory=tmp_path / "run", task=spec, plan=PLAN, settings=settings)

    network = Network(on_loss="continue", timeout=20)
    options = {"checkpoint_every": 2}
    run_linked(RING, lambda t: run_worker(job(4), t, network, **options))

    def work(transport):
        def show(record) -> None:
            if transport.rank == 2 and record.epoch == 7:
                raise KilledError

        try:
            return run_worker(job(40), transport, network, resume=True, on_record=show, **options)
        except KilledError:
            vanish(transport)
            away.set()
        transport = LinkTransport(RING, 2, peers, timeout=90.0, start_timeout=60.0)
        try:
            return run_worker(job(40), transport, network, resume=True, **options)
        finally:
            transport.close()

    results = run_linked(RING, work, peers=peers)
    assert away.is_set()
    assert [records[-1].epoch for records in results] == [40.0] * 4
    assert results[2][0].epoch > 7
    assert [info.is_whole for info in checkpoints(tmp_path / "run" / "checkpoints")] == [True] * 2


def test_a_checkpoint_is_not_complete_without_who_died_while_it_was_listed(
    tmp_path, monkeypatch
) -> None:
    """Its list named their files, which were not there, and the last whole one was removed."""
    save(tmp_path)
    mine = threading.local()

    def manifests(root):
        if getattr(mine, "dies", False):
            vanish(mine.transport)
            raise KilledError
        return read(root)

    read = checkpoint._manifests
    monkeypatch.setattr(checkpoint, "_manifests", manifests)

    def work(transport):
        mine.transport = transport
        worker = Worker(transport)
        worker.gossip.load(tmp_path)
        worker.run(LOST)
        mine.dies = transport.rank == 2
        try:
            worker.gossip.save(tmp_path, keep=1)
        except KilledError:
            return
        worker.gossip.detach()

    run_linked(RING, work)
    whole, partial = checkpoints(tmp_path)
    assert (whole.iteration, whole.workers) == (4, [0, 1, 2, 3])
    assert (partial.iteration, partial.workers, partial.is_whole) == (LOST, [0, 1, 3], False)


@pytest.mark.parametrize("shared", [True, False])
def test_who_was_away_takes_the_state_of_a_neighbour_that_resumes(tmp_path, shared) -> None:
    def folder(rank: int):
        return tmp_path if shared else tmp_path / f"host-{rank}"

    lost = threading.Barrier(4)

    def stop(transport):
        worker = Worker(transport)
        worker.run(4)
        worker.gossip.save(folder(transport.rank))
        worker.run(LOST)
        lost.wait(60)
        if transport.rank == 2:
            return vanish(transport)
        worker.gossip.save(folder(transport.rank), keep=1)  # the whole one stays all the same
        return worker.gossip.detach()

    run_linked(RING, stop)
    assert [info.iteration for info in checkpoints(folder(0))] == [4, LOST]
    back = threading.Event()

    def go_on(transport):
        worker = Worker(transport)
        worker.gossip.membership.carry(lambda: {"rank": transport.rank}, lambda _: None)
        extra = worker.gossip.load(folder(transport.rank))
        assert worker.gossip.iteration == LOST
        start = worker.values()
        if transport.rank == 2:
            assert extra == {"rank": worker.gossip.membership.donor}
            back.set()
        else:
            worker.tend_until(back)
        worker.run(END)
        distance = worker.gossip.consensus_distance()
        worker.gossip.detach()
        return start, round(distance, 9), worker.gossip.membership.donor

    starts, distances, donors = zip(*run_linked(RING, go_on), strict=True)
    assert starts[2] == starts[donors[2]]
    assert len(set(distances)) == 1

    def stay(transport):
        worker = Worker(transport, on_loss="stop")
        worker.gossip.load(folder(transport.rank))  # nobody would give worker 2 a state
        with pytest.raises(DataError, match=f"worker 2 was away when that of iteration {LOST}"):
            worker.gossip.load(folder(transport.rank), iteration=LOST)
        return worker.gossip.iteration

    assert run_linked(RING, stay) == [4] * 4
