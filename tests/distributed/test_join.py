"""Training with unequal amounts of data inside `join()`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import matcha
from matcha import families
from matcha.distributed import Gossip
from matcha.distributed.exchange.meeting import PlanCursor
from matcha.testing import run_threads

PLANS = {
    2: [
        (families.path(2), 0.5, "matcha"),
        (families.path(2), 1.0, "vanilla"),
        (families.path(2), 0.5, "greedy"),
        (families.path(2), 0.5, "periodic"),
    ],
    3: [
        (families.ring(3), 0.5, "greedy"),
        (families.path(3), 0.6, "matcha"),
        (families.star(3), 1.0, "vanilla"),
        (families.ring(3), 0.3, "single"),
    ],
    4: [(families.complete(4), 0.5, "greedy")],
    5: [
        (families.complete(5), 0.4, "greedy"),
        (families.ring(5), 0.5, "matcha"),
        (families.star(5), 0.3, "periodic"),
        (families.complete(5), 1.0, "vanilla"),
    ],
}


def cases(*sizes: int) -> list[Any]:
    return [pytest.param(*case, id=f"{case[2]}-{size}") for size in sizes for case in PLANS[size]]


class Worker:
    """A quadratic of its own, and as many batches per epoch as its number and the epoch say."""

    def __init__(self, transport: Any, plan: Any, **options: Any) -> None:
        self.rank, self.num_workers = transport.rank, transport.num_workers
        self.model = nn.Linear(3, 1, bias=False).double()
        nn.init.zeros_(self.model.weight)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.5)
        self.gossip = Gossip(
            self.model, self.optimizer, plan, transport=transport, timeout=60, **options
        )

    def batches(self, rank: int, epoch: int) -> int:
        return (3 * rank + 5 * epoch) % 4

    def train(self, epoch: int) -> None:
        with self.gossip.join():
            for _ in range(self.batches(self.rank, epoch)):
                self.optimizer.zero_grad()
                (self.model(torch.eye(3).double()) - self.rank).square().sum().backward()
                self.optimizer.step()

    def longest(self, epochs: int) -> int:
        """Steps of whoever takes most, over the epochs so far."""
        return sum(
            max(self.batches(rank, epoch) for rank in range(self.num_workers))
            for epoch in range(epochs)
        )


@pytest.mark.parametrize(("topology", "budget", "strategy"), cases(2, 3, 5))
def test_all_are_at_one_iteration_after_each_epoch(topology, budget, strategy, tmp_path) -> None:
    """They ended apart: `averaged()` was refused, and nothing loaded what `save()` had written."""
    plan = matcha.plan(topology, budget, strategy)

    def work(transport) -> list[Any]:
        worker = Worker(transport, plan)
        found = []
        with worker.gossip as gossip:
            for epoch in range(3):
                worker.train(epoch)
                found.append((gossip.iteration, gossip.averaged_state_dict()["weight"]))
                assert gossip.iteration == worker.longest(epoch + 1)
            gossip.save(tmp_path, extra={"rank": transport.rank})
            own = worker.model.weight.detach().clone()
            worker.train(3)
            assert gossip.load(tmp_path) == {"rank": transport.rank}
            assert torch.equal(worker.model.weight, own)
            assert gossip.iteration == found[-1][0]
        return found

    results = run_threads(topology.num_workers, work)
    for values in zip(*results, strict=True):
        assert len({iteration for iteration, _ in values}) == 1
        assert all(torch.equal(average, values[0][1]) for _, average in values)


@pytest.mark.parametrize("overlap", [False, True])
def test_workers_meet_in_every_epoch(overlap) -> None:
    """After the first join nobody exchanged again: each went to its own optimum."""
    plan = matcha.plan(families.ring(3), 1.0, "vanilla")

    def work(transport) -> list[int]:
        worker = Worker(transport, plan, overlap=overlap)
        sent = []
        with worker.gossip as gossip:
            for epoch in range(4):
                before = gossip.state.exchange.bytes_sent
                worker.train(epoch)
                sent.append(gossip.state.exchange.bytes_sent - before)
        return sent

    for sent in run_threads(3, work):
        assert min(sent) > 0


def test_asynchronous_workers_end_at_one_iteration_too(tmp_path) -> None:
    plan = matcha.plan(families.complete(3), 0.7, "greedy")

    def work(transport) -> torch.Tensor:
        worker = Worker(transport, plan, asynchronous=True)
        with worker.gossip as gossip:
            for epoch in range(4):
                worker.train(epoch)
                assert gossip.iteration == worker.longest(epoch + 1)
            gossip.save(tmp_path)
            return gossip.averaged_state_dict()["weight"]

    averages = run_threads(3, work)
    assert all(torch.equal(average, averages[0]) for average in averages)


@pytest.mark.parametrize(("topology", "budget", "strategy"), cases(3, 4))
def test_no_round_is_gone_through_in_vain(topology, budget, strategy, monkeypatch) -> None:
    """Where a plan never pairs two neighbours it went through 100,000 empty rounds."""
    plan = matcha.plan(topology, budget, strategy)
    advanced: list[int] = []
    advance = PlanCursor.advance

    def counted(self: PlanCursor) -> None:
        advanced.append(self.iteration)
        advance(self)

    monkeypatch.setattr(PlanCursor, "advance", counted)

    def work(transport) -> None:
        worker = Worker(transport, plan)
        with worker.gossip:
            worker.train(1)

    run_threads(topology.num_workers, work)
    assert len(advanced) < 1000


@pytest.mark.parametrize(("topology", "budget", "strategy"), cases(2, 3, 5))
def test_fifty_epochs_saved_resumed_and_averaged(topology, budget, strategy, tmp_path) -> None:
    """A run that is stopped and resumed every tenth epoch ends at the bits of one that is not."""
    plan = matcha.plan(topology, budget, strategy)

    def whole(transport) -> torch.Tensor:
        worker = Worker(transport, plan)
        with worker.gossip as gossip:
            for epoch in range(50):
                worker.train(epoch)
            assert gossip.iteration == worker.longest(50)
            return gossip.averaged_state_dict()["weight"]

    def in_parts(folder: Path, start: int) -> list[torch.Tensor]:
        def work(transport) -> torch.Tensor:
            worker = Worker(transport, plan)
            with worker.gossip as gossip:
                if start:
                    assert gossip.load(folder) == {"epoch": start}
                for epoch in range(start, start + 10):
                    worker.train(epoch)
                gossip.save(folder, extra={"epoch": start + 10})
                return gossip.averaged_state_dict()["weight"]

        return run_threads(topology.num_workers, work)

    expected = run_threads(topology.num_workers, whole)
    for start in range(0, 50, 10):
        found = in_parts(tmp_path, start)
    for average in (*expected, *found):
        assert torch.equal(average, expected[0])
