"""Dealing: every batch is trained on once, whoever joins or leaves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import matcha
from matcha import families
from matcha.plans import Events, Join, Leave
from matcha.strategies import with_events
from matcha.training.task import DealtTask, dealt
from matcha.zoo.recipes import Choices, recipe

EVENTS = Events(
    joins=(Join(worker=4, links=(0, 2), at=5), Join(worker=5, links=(1, 4), at=5)),
    leaves=(Leave(worker=1, at=11),),
)


def grown():
    return with_events(matcha.plan(families.ring(4), 0.5, "greedy"), EVENTS)


def test_each_batch_is_dealt_once_and_in_order():
    task = recipe("digits").task(Choices(num_workers=4))
    task.to(torch.device("cpu"), torch.float64)
    plan, steps = grown(), task.steps_per_epoch
    mine = dealt(task, plan)
    assert isinstance(mine, DealtTask)
    assert mine.num_workers == 6
    told = []
    for epoch in range(2):
        tables = {name: torch.from_numpy(t) for name, t in mine.tables(epoch).items()}
        for k in range(steps):
            members = plan.level_at(epoch * steps + k).members
            inputs, _ = mine.batch({name: table[k] for name, table in tables.items()})
            told += [inputs[worker] for worker in members]
    expected = []
    for epoch in range(3):
        tables = {name: torch.from_numpy(t) for name, t in task.tables(epoch).items()}
        for k in range(steps):
            expected += list(task.batch({name: table[k] for name, table in tables.items()})[0])
    assert len(told) == plan.steps_before(2 * steps)
    assert all(torch.equal(a, b) for a, b in zip(told, expected, strict=False))


def test_a_plan_whose_workers_stay_leaves_the_task_alone():
    task = recipe("digits").task(Choices(num_workers=4))
    assert dealt(task, matcha.plan(families.ring(4), 0.5)) is task
    with pytest.raises(matcha.MatchaError, match="5 workers and the task for 4"):
        dealt(task, matcha.plan(families.ring(5), 0.5))


def test_steps_before_counts_those_who_were_there():
    plan = grown()
    there = [len(plan.level_at(k).members) for k in range(30)]
    assert [plan.steps_before(k) for k in range(30)] == [0, *np.cumsum(there)[:-1]]
