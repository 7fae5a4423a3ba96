"""Language modelling: each worker reads its own stretch of the text, many places at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from matcha.errors import DataError
from matcha.training.task import Evaluation, Task, digest, model_digest
from matcha.zoo.data import Labels, Text
from matcha.zoo.models import LanguageModel, Transformer, seeded


def _columns(words: Labels, batch_size: int) -> Labels:
    """The text cut into ``batch_size`` columns read side by side; time is the first axis."""
    length = len(words) // batch_size
    return np.ascontiguousarray(words[: length * batch_size].reshape(batch_size, length).T)


def mean_cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    """The mean over a batch; where batches of several workers are stacked, one per worker."""
    scores = scores.flatten(0, -2)
    if targets.dim() == 2:
        return functional.cross_entropy(scores, targets.flatten())
    losses = functional.cross_entropy(scores, targets.flatten(), reduction="none")
    return losses.view(len(targets), -1).mean(1)


class LanguageTask(Task):
    """Predict the next word; an LSTM's state is carried from batch to batch within an epoch.

    Args:
        name: what records call the task.
        text: the corpus; worker i reads the i-th of m equal stretches of its training part.
        num_workers: m.
        model: makes a new model; its weights come from ``seed``.
        batch_size: places in its stretch that a worker reads at once.
        length: words per batch and place, through which gradients flow back.
        seed: of the initial weights.
    """

    def __init__(
        self,
        name: str,
        text: Text,
        num_workers: int,
        model: Callable[[], LanguageModel | Transformer],
        *,
        batch_size: int = 10,
        length: int = 35,
        seed: int = 0,
    ) -> None:
        self.name, self.num_workers, self.seed = name, num_workers, seed
        self.batch_size, self.length = batch_size, length
        self._make, self._text = model, text
        each = len(text.train) // num_workers
        stretches = [text.train[i * each : (i + 1) * each] for i in range(num_workers)]
        if each // batch_size <= length:
            raise DataError(
                f"the training text has {len(text.train):,} words: too few for "
                f"{num_workers} workers that read {batch_size} places, {length} words at a time"
            )
        if len(text.valid) < 2:
            raise DataError("the validation text must have 2 words or more to predict one")
        self._columns = np.stack([_columns(stretch, batch_size) for stretch in stretches])
        self.steps_per_epoch = (self._columns.shape[1] - 1) // length

    @cached_property
    def _fixed(self) -> dict[str, Any]:
        """The parts of the identity that take a while to work out."""
        return {"text": digest(self._columns), "model": model_digest(self.model())}

    def identity(self) -> dict[str, Any]:
        """Model, text, batch size and length."""
        return {
            "batch size": self.batch_size,
            "length": self.length,
            "number of words": len(self._text.train),
            **self._fixed,
        }

    def model(self) -> nn.Module:
        return seeded(self._make, self.seed)

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._words = torch.from_numpy(self._columns).to(device)
        self._steps = torch.arange(self.length + 1, device=device)
        self._valid = torch.from_numpy(
            _columns(self._text.valid, min(64, len(self._text.valid) // 2))
        )
        self._valid = self._valid.to(device)

    def tables(self, epoch: int) -> dict[str, npt.NDArray[np.generic]]:
        starts = np.arange(self.steps_per_epoch, dtype=np.int64) * self.length
        return {"start": np.repeat(starts[:, None], self.num_workers, axis=1)}

    def batch(self, rows: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        times = rows["start"][:, None] + self._steps
        index = times[..., None].expand(-1, -1, self._words.shape[-1])
        words = self._words.gather(1, index)
        return words[:, :-1], words[:, 1:]

    def initial_state(self) -> tuple[Tensor, ...]:
        model = self.model()
        assert isinstance(model, (LanguageModel, Transformer))
        return model.state(self.batch_size)

    def loss(
        self, model: nn.Module, inputs: Tensor, targets: Tensor, state: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        scores, after = model(inputs, *state)
        return mean_cross_entropy(scores, targets), after

    def evaluate(self, model: nn.Module) -> Evaluation:
        assert isinstance(model, (LanguageModel, Transformer))
        words = self._valid
        state = tuple(tensor.to(words.device) for tensor in model.state(words.shape[1]))
        total = torch.zeros((), dtype=torch.float64, device=words.device)
        for start in range(0, len(words) - 1, self.length):
            piece = words[start : start + self.length + 1]
            scores, state = model(piece[:-1], *state)
            scores = scores.flatten(0, 1).to(torch.float32)
            total += functional.cross_entropy(scores, piece[1:].flatten(), reduction="sum")
        return Evaluation(loss=float(total) / (words.numel() - words.shape[1]))
