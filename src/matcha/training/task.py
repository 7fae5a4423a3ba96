"""What is trained: the contract between either engine and a task (data, model, loss)."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from matcha.errors import InputError
from matcha.plans import PlanLike


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """How good a model is on some data."""

    loss: float
    accuracy: float | None = None
    examples: int | None = None
    """How many it was tried on, where the accuracy is a sample's."""

    @property
    def accuracy_error(self) -> float | None:
        """The accuracy's standard error, were other examples drawn.

        >>> round(Evaluation(loss=0.1, accuracy=0.9, examples=900).accuracy_error, 4)
        0.01
        """
        if self.accuracy is None or not self.examples:
            return None
        return math.sqrt(self.accuracy * (1 - self.accuracy) / self.examples)


class Task(Protocol):
    """Data, model and loss of m workers.

    An epoch's choices (which examples, which crops) are tables of plain numbers drawn on the host
    from (seed, worker, epoch); ``batch`` turns one row of them into tensors with operations that
    run the same on any device and inside a captured graph. A class of yours may inherit from this
    one for its two defaults, or have the same members.
    """

    name: str
    seed: int
    num_workers: int
    steps_per_epoch: int

    def identity(self) -> dict[str, Any]:
        """What tells this task from others of its name, by words a person would use; plain values.

        A checkpoint keeps it beside name, seed and number of workers, and training goes on only
        with the same: model, data, how the data are shared among workers, batch size.
        """

    def model(self) -> nn.Module:
        """A new model with the initial weights, the same on every call."""

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move the data to a device; floating-point inputs are made in ``dtype``."""

    def tables(self, epoch: int) -> dict[str, npt.NDArray[np.generic]]:
        """One epoch's choices: arrays whose first two axes are iteration and worker."""

    def batch(self, rows: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """All workers' inputs and targets of one iteration; the first axis is the worker."""

    def initial_state(self) -> tuple[Tensor, ...]:
        """What one worker carries from batch to batch within an epoch; by default nothing."""
        return ()

    def loss(
        self, model: nn.Module, inputs: Tensor, targets: Tensor, state: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One worker's mean loss on a batch, and the state after it."""

    def evaluate(self, model: nn.Module) -> Evaluation:
        """Loss and accuracy on held-out data."""

    def recalibration(self) -> Iterable[Tensor]:
        """Inputs over all workers' data on which BatchNorm statistics can be measured again.

        None by default, for models without BatchNorm.
        """
        return iter(())


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSpec:
    """A task that is not made yet: its name, its choices, and how to make it."""

    name: str
    seed: int
    choices: Mapping[str, Any] = field(default_factory=dict)
    """What tells it from others of its name, in plain values; specs with the same are equal."""
    make: Callable[[], Task] = field(compare=False)

    @classmethod
    def of(cls, task: Task) -> TaskSpec:
        """The spec of a task that was made already."""
        return cls(name=task.name, seed=task.seed, choices=task.identity(), make=lambda: task)


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

    A task's batches have an order: iteration by iteration, worker by worker, as it was made. The
    workers that the plan has at an iteration take the next ones, in the order of their numbers. So
    each batch is trained on once, and which worker has it follows from the plan alone. A pass over
    the data is shorter where more workers take part; an epoch keeps its number of iterations.
    Models are evaluated on the whole task, as it was made.
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
        whole_tables = cache(self.whole.tables)
        columns: defaultdict[str, list[npt.NDArray[np.generic]]] = defaultdict(list)
        dealt = np.zeros((steps, self.num_workers), np.int64)
        for k in range(steps):
            iteration = epoch * steps + k
            row, place = divmod(self.plan.steps_before(iteration), width)
            for below in range(depth):
                turn, step = divmod(row + below, steps)
                for name, table in whole_tables(turn).items():
                    columns[name].append(table[step])
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


@runtime_checkable
class KnownLoss(Protocol):
    """A task that knows its training loss exactly, so that no sample need stand for it."""

    def training_loss(self, model: nn.Module) -> float:
        """The loss on all workers' data."""


@runtime_checkable
class KnownOutputs(Protocol):
    """A task whose models say how likely each class is."""

    def probabilities(self, model: nn.Module) -> Tensor:
        """Of each class, the last axis, on a fixed held-out batch."""


@runtime_checkable
class KnownGradient(Protocol):
    """A task that knows its full gradient and the constants of Theorem 2."""

    def gradient_norm(self, model: nn.Module) -> float:
        """‖∇F(x)‖² at a model's parameters."""

    def gradient_bound(self, rho: float, iterations: int, learning_rate: float) -> float | None:
        """Theorem 2's bound on the average of ‖∇F(x̄)‖²; None where the rate is not admissible."""


def batch_indices(
    parts: Sequence[npt.NDArray[np.int64]], steps: int, batch: int, epoch: int, *key: int
) -> npt.NDArray[np.int64]:
    """Each worker's way through its part in an epoch, in batches: a new order of it for each.

    Where a part is shorter than the epoch, the worker walks through it again. The first axes are
    iteration and worker.
    """
    index = np.empty((steps, len(parts), batch), np.int64)
    for worker, part in enumerate(parts):
        random = generator(*key, worker, epoch)
        walks = -(-steps * batch // len(part))
        order = np.concatenate([random.permutation(part) for _ in range(walks)])
        index[:, worker] = order[: steps * batch].reshape(steps, batch)
    return index


def generator(*key: int) -> np.random.Generator:
    """A random generator for one purpose: a pure function of its key.

    >>> generator(0, 1, 2).integers(1000) == generator(0, 1, 2).integers(1000)
    np.True_
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


def first_batches(task: Task, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """All workers' inputs and targets, iteration by iteration, as the first epoch draws them."""
    tables = {name: torch.from_numpy(table).to(device) for name, table in task.tables(0).items()}
    for k in range(task.steps_per_epoch):
        yield task.batch({name: table[k] for name, table in tables.items()})


def digest(*arrays: npt.NDArray[Any]) -> str:
    """A few letters that tell arrays from others, for :meth:`Task.identity`.

    >>> digest(np.zeros(3)) == digest(np.zeros(3)), digest(np.zeros(3)) == digest(np.zeros(4))
    (True, False)
    """
    found = hashlib.sha256()
    for array in arrays:
        found.update(f"{array.dtype} {array.shape}".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:12]


def model_digest(model: nn.Module) -> str:
    """A few letters that tell a model from others: its parameters' names and shapes.

    >>> model_digest(nn.Linear(2, 1)) == model_digest(nn.Linear(2, 2))
    False
    """
    named = [f"{name} {tuple(value.shape)}" for name, value in model.named_parameters()]
    return hashlib.sha256("; ".join(named).encode()).hexdigest()[:12]
