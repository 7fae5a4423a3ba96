from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.distributed import cases

from matcha.distributed.push_sum import PushSumValues, push_sum_of
from matcha.errors import InputError
from matcha.rounds import PushSum

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
    values = [torch.ones(2)]
    assert push_sum_of(cases.make_plan("greedy", "pairwise"), values, allowed=False) is None
    assert isinstance(push_sum_of(PLAN, values, allowed=True), PushSumValues)
    with pytest.raises(InputError, match="leave overlap and on_loss out"):
        push_sum_of(PLAN, values, allowed=False)
