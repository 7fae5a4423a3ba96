from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.distributed import cases

from matcha.distributed import Gossip
from matcha.distributed.exchange.averaging import PushSumValues
from matcha.errors import InputError
from matcha.rounds import PushSum
from matcha.testing import run_threads

PLAN = cases.real_plan("rounds", "push", 3)


def test_workers_values_are_those_of_the_definition() -> None:
    """Steps between rounds are taken at z; x and ω are mixed as the rounds say."""
    start = np.array([[1.0, 2.0], [0.0, -3.0], [7.0, 4.0]])
    z = [torch.from_numpy(row.copy()) for row in start]
    workers = [PushSumValues([one]) for one in z]
    definition, expected = PushSum(start), start
    for k in range(9):
        step = np.random.default_rng(k).normal(size=start.shape)
        expected = definition.mix(PLAN.round(k), expected + step)
        for one, worker, move in zip(z, workers, step, strict=True):
            one += torch.from_numpy(move)
            worker.__enter__()
        for part in range(2):  # x, and ω
            rows = np.stack([worker.mixed[part].numpy() for worker in workers])
            for worker, row in zip(workers, PLAN.round(k).mix(rows), strict=True):
                worker.mixed[part].copy_(torch.from_numpy(row))
        for worker in workers:
            worker.__exit__()
        np.testing.assert_allclose(np.stack([one.numpy() for one in z]), expected, atol=1e-12)
        assert sum(worker.omega for worker in workers) == pytest.approx(3)
    assert {worker.omega for worker in workers} != {1.0}


def test_only_messages_that_do_not_come_round_need_it() -> None:
    def work(transport, plan) -> bool:
        model = cases.Quadratic(transport.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=cases.RATE)
        with Gossip(model, optimizer, plan, transport=transport) as gossip:
            return gossip.state.push_sum is not None

    balanced = cases.make_plan("greedy", "pairwise")
    assert run_threads(PLAN.num_workers, lambda t: work(t, PLAN)) == [True] * PLAN.num_workers
    assert not any(run_threads(balanced.num_workers, lambda t: work(t, balanced)))


class Worker:
    """One worker's quadratic under a plan that needs push-sum."""

    def __init__(self, transport, **options) -> None:
        self.model = cases.Quadratic(transport.rank)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=cases.RATE)
        settings = {"transport": transport, "timeout": 150.0, **options}
        self.gossip = Gossip(self.model, self.optimizer, PLAN, **settings)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model().backward()
            self.optimizer.step()


def test_resuming_continues_to_the_same_bits_with_omega(tmp_path: Path) -> None:
    def uninterrupted(transport):
        worker = Worker(transport)
        worker.train(4)
        worker.gossip.save(tmp_path)
        omega = worker.gossip.state.push_sum.omega
        worker.train(5)
        return omega, worker.model.flat()

    def resumed(transport):
        worker = Worker(transport)
        worker.train(1)  # whatever happened before loading is forgotten
        worker.gossip.load(tmp_path)
        omega = worker.gossip.state.push_sum.omega
        worker.train(5)
        return omega, worker.model.flat()

    before, after = run_threads(3, uninterrupted), run_threads(3, resumed)
    assert {omega for omega, _ in before} != {1.0}
    for (omega, values), (again, same) in zip(before, after, strict=True):
        assert omega == again
        for dtype in cases.DTYPES:
            np.testing.assert_array_equal(values[dtype], same[dtype])


def test_the_average_is_of_x_and_not_of_z(tmp_path: Path) -> None:
    def work(transport):
        worker = Worker(transport)
        worker.train(4)
        own, omega = worker.model.flat()["float64"], worker.gossip.state.push_sum.omega
        with worker.gossip.averaged():
            average = worker.model.flat()["float64"]
        distance = worker.gossip.consensus_distance()
        assert np.array_equal(worker.model.flat()["float64"], own)
        worker.gossip.save(tmp_path)
        worker.gossip.load(tmp_path, average=True)
        assert worker.gossip.state.push_sum.omega == 1.0
        return own, omega, average, distance, worker.model.flat()["float64"]

    found = run_threads(3, work)
    z, omega = np.stack([own for own, *_ in found]), np.array([one[1] for one in found])
    assert np.ptp(omega) > 0.1
    mean = omega @ z / omega.sum()
    assert not np.allclose(mean, z.mean(axis=0), atol=1e-6)
    for _, _, average, distance, restarted in found:
        np.testing.assert_allclose(average, mean, atol=1e-12)
        np.testing.assert_allclose(restarted, mean, atol=1e-12)
        assert distance >= ((z - mean) ** 2).sum() / 3  # and as much again in single precision


@pytest.mark.parametrize("option", [{"overlap": True}, {"momentum": "outer"}])
def test_what_does_not_go_with_it_is_refused(option) -> None:
    def work(transport):
        with pytest.raises(InputError, match=r"does not go with a plan that needs push-sum"):
            Worker(transport, **option)

    run_threads(3, work)


def test_a_script_that_saves_by_itself_is_told_of_x_and_omega() -> None:
    def work(transport):
        gossip = Worker(transport).gossip
        with pytest.raises(InputError, match=r"use save\(\) and load\(\)"):
            gossip.load_state_dict(gossip.state_dict())

    run_threads(3, work)
