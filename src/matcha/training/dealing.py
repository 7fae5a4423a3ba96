"""Dealing: which batches a worker trains on in a team that grows and shrinks.

A task's batches have an order: iteration by iteration, worker by worker, as it was made. The
workers that the plan has at an iteration take the next ones, in the order of their numbers. So each
batch is trained on once, and who has which follows from the plan alone. A pass over the data is
shorter where more workers take part; an epoch stays so many iterations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from matcha.errors import InputError
from matcha.plans import PlanLike
from matcha.training.task import Task


def dealt(task: Task, plan: PlanLike) -> Task:
    """The task as it is, or dealt to the plan's workers where they change."""
    first = plan.level_at(0).members
    changes = any(level.members != first for level in plan.levels)
    expected = len(first) if changes else plan.num_workers
    if task.num_workers != expected:
        raise InputError(f"the plan is for {expected} workers and the task for {task.num_workers}.")
    return cast(Task, DealtTask(task, plan)) if changes else task


class DealtTask:
    """A task for the workers of a plan that grows or shrinks, dealt from one for its first workers.

    Attributes:
        whole: the task as it was made, on which models are evaluated.
        plan: who is there when; it may get further stages.
    """

    def __init__(self, whole: Task, plan: PlanLike) -> None:
        self.whole, self.plan = whole, plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)

    @property
    def num_workers(self) -> int:
        """How many numbers workers have, those that are not there yet or any more included."""
        return self.plan.num_workers

    def tables(self, epoch: int) -> dict[str, npt.NDArray[np.generic]]:
        """For each iteration the rows of choices in which its batches lie, and which is whose."""
        steps, width = self.whole.steps_per_epoch, self.whole.num_workers
        most = max(len(level.members) for level in self.plan.levels)
        depth = -(-most // width) + 1  # rows that as many batches one after another may touch
        known: dict[int, dict[str, npt.NDArray[np.generic]]] = {}
        columns: dict[str, list[npt.NDArray[np.generic]]] = {}
        dealt = np.zeros((steps, self.num_workers), np.int64)
        for k in range(steps):
            iteration = epoch * steps + k
            row, place = divmod(self.plan.steps_before(iteration), width)
            for below in range(depth):
                turn, step = divmod(row + below, steps)
                if turn not in known:
                    known[turn] = self.whole.tables(turn)
                for name, table in known[turn].items():
                    columns.setdefault(name, []).append(table[step])
            members = list(self.plan.level_at(iteration).members)
            dealt[k, members] = place + np.arange(len(members))
        shaped = {
            name: np.stack(rows).reshape(steps, depth * width, *rows[0].shape[1:])
            for name, rows in columns.items()
        }
        return {**shaped, "dealt": dealt}

    def batch(self, rows: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The batch of each worker; of one that is not there any."""
        width, dealt = self.whole.num_workers, rows["dealt"]
        choices = {name: table for name, table in rows.items() if name != "dealt"}
        length = next(iter(choices.values())).shape[0]
        parts = [
            self.whole.batch({name: table[n : n + width] for name, table in choices.items()})
            for n in range(0, length, width)
        ]
        inputs, targets = (
            torch.cat(each).index_select(0, dealt) for each in zip(*parts, strict=True)
        )
        return inputs, targets
