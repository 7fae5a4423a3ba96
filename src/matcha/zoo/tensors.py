"""A task of your own: tensors, a model and a loss, shared among workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from matcha.errors import InputError
from matcha.training.task import Evaluation, batch_indices, digest, generator
from matcha.zoo.models import ModelTask

Loss = Callable[[Tensor, Tensor], Tensor]


class TensorTask(ModelTask):
    """Examples and targets as tensors, dealt to the workers at random.

    Args:
        model: makes a new model; its first weights are drawn under the seed.
        examples: training inputs, one per row.
        targets: what the model should predict.
        test: held-out inputs and targets; None tests on the training data.
        loss: of predictions and targets, the mean over a batch.
        num_workers: how many share the data.
        batch_size: examples per worker and iteration.
        seed: of weights, order and the partition.
        name: what records call it.

    Raises:
        InputError: There are fewer examples than a batch for each worker.

    >>> x, y = torch.randn(64, 3), torch.randint(2, (64,))
    >>> task = TensorTask(lambda: nn.Linear(3, 2), x, y, num_workers=4, batch_size=8)
    >>> task.steps_per_epoch
    2
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        examples: Tensor,
        targets: Tensor,
        *,
        num_workers: int,
        batch_size: int = 16,
        test: tuple[Tensor, Tensor] | None = None,
        loss: Loss = nn.functional.cross_entropy,
        seed: int = 0,
        name: str = "own",
    ) -> None:
        if len(examples) != len(targets):
            raise InputError(f"{len(examples)} examples have {len(targets)} targets.")
        self.steps_per_epoch = len(examples) // (num_workers * batch_size)
        if self.steps_per_epoch < 1:
            raise InputError(
                f"{len(examples)} examples are too few for {num_workers} batches of {batch_size}."
            )
        super().__init__(name, model, num_workers, batch_size, seed)
        self._loss = loss
        self._own = (examples, targets, *(test or (examples, targets)))
        order = generator(seed, 0).permutation(len(examples))
        self._parts = np.array_split(order, num_workers)

    def data(self) -> dict[str, Any]:
        return {"examples": digest(*(tensor.cpu().numpy() for tensor in self._own))}

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        self._held = tuple(
            t.to(device, dtype if t.is_floating_point() else None) for t in self._own
        )

    def tables(self, epoch: int) -> dict[str, npt.NDArray[np.generic]]:
        steps, batch = self.steps_per_epoch, self.batch_size
        return {"index": batch_indices(self._parts, steps, batch, epoch, self.seed, 1)}

    def batch(self, rows: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self._held[0][rows["index"]], self._held[1][rows["index"]]

    def loss(
        self, model: nn.Module, inputs: Tensor, targets: Tensor, state: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        return self._loss(model(inputs), targets), ()

    def evaluate(self, model: nn.Module) -> Evaluation:
        inputs, targets = self._held[2:]
        answers = model(inputs)
        accuracy = None
        if not targets.is_floating_point() and answers.ndim == 2:
            accuracy = float((answers.argmax(-1) == targets).float().mean())
        loss = float(self._loss(answers, targets))
        return Evaluation(loss=loss, accuracy=accuracy, examples=len(targets))

    def recalibration(self) -> Iterator[Tensor]:
        """Up to 2,048 training examples, the same each time."""
        yield self._held[0][:2048]
