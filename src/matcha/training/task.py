"""What is trained: the contract between either engine and a task (data, model, loss)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn


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
        ...

    def model(self) -> nn.Module:
        """A new model with the initial weights, the same on every call."""
        ...

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move the data to a device; floating-point inputs are made in ``dtype``."""
        ...

    def tables(self, epoch: int) -> dict[str, npt.NDArray[np.generic]]:
        """One epoch's choices: arrays whose first two axes are iteration and worker."""
        ...

    def batch(self, rows: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """All workers' inputs and targets of one iteration; the first axis is the worker."""
        ...

    def initial_state(self) -> tuple[Tensor, ...]:
        """What one worker carries from batch to batch within an epoch; by default nothing."""
        return ()

    def loss(
        self, model: nn.Module, inputs: Tensor, targets: Tensor, state: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One worker's mean loss on a batch, and the state after it."""
        ...

    def evaluate(self, model: nn.Module) -> Evaluation:
        """Loss and accuracy on held-out data."""
        ...

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


@runtime_checkable
class KnownLoss(Protocol):
    """A task that knows its training loss exactly, so that no sample need stand for it."""

    def training_loss(self, model: nn.Module) -> float:
        """The loss on all workers' data."""
        ...


@runtime_checkable
class KnownOutputs(Protocol):
    """A task whose models say how likely each class is."""

    def probabilities(self, model: nn.Module) -> Tensor:
        """Of each class, the last axis, on a fixed held-out batch."""
        ...


@runtime_checkable
class KnownGradient(Protocol):
    """A task that knows its full gradient and the constants of Theorem 2."""

    def gradient_norm(self, model: nn.Module) -> float:
        """‖∇F(x)‖² at a model's parameters."""
        ...

    def gradient_bound(self, rho: float, iterations: int, learning_rate: float) -> float | None:
        """Theorem 2's bound on the average of ‖∇F(x̄)‖²; None where the rate is not admissible."""
        ...


def generator(*key: int) -> np.random.Generator:
    """A random generator for one purpose: a pure function of its key.

    >>> generator(0, 1, 2).integers(1000) == generator(0, 1, 2).integers(1000)
    np.True_
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


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
