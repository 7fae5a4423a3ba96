"""Image classification: device-resident data, crops and flips from tables of plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from matcha.errors import InputError
from matcha.training.task import Evaluation, batch_indices, digest, generator
from matcha.zoo.data import Images, Indices
from matcha.zoo.models import ModelTask, mean_cross_entropy

_ORDER, _CROP, _RECALIBRATION = 0x4F52, 0x4352, 0x5243  # purposes of random draws
_JUDGED = 256  # held-out images by which workers' answers are compared


class ImageTask(ModelTask):
    """Classify images; each worker has its own part of the training set.

    An epoch is as many iterations as the whole training set fills batches of all workers; a worker
    walks through its own part in a new order each epoch, and again where it is shorter than others.

    Parts are each worker's examples, from :func:`matcha.zoo.data.partition`. Initial weights of
    what ``model`` makes, order and augmentation (random shifts by up to ``padding`` pixels, and
    horizontal flips) come from ``seed``. ``flat`` inputs are vectors, for linear models.
    """

    def __init__(
        self,
        name: str,
        data: Images,
        parts: tuple[Indices, ...],
        model: Callable[[], nn.Module],
        *,
        batch_size: int = 64,
        seed: int = 0,
        augment: bool = False,
        padding: int = 4,
        flat: bool = False,
    ) -> None:
        if batch_size < 1:
            raise InputError(f"batch_size must be 1 or more, not {batch_size}")
        number = sum(map(len, parts))
        if number < batch_size:
            raise InputError(
                f"a batch of {batch_size:,} is larger than the whole training set of {number:,}"
            )
        super().__init__(name, model, len(parts), batch_size, seed)
        self.steps_per_epoch = max(1, number // (len(parts) * batch_size))
        self.parts, self.augment, self.flat = parts, augment, flat
        self._data, self._padding = data, padding if augment else 0
        self._size = data.train_images.shape[1:3]
        pixels = data.train_images.reshape(-1, data.train_images.shape[-1])
        self._mean = torch.tensor(pixels.mean(0), dtype=torch.float32)
        self._scale = torch.tensor(1 / np.maximum(pixels.std(0), 1e-6), dtype=torch.float32)
        self._held: dict[str, Tensor] = {}

    def data(self) -> dict[str, Any]:
        return {
            "number of examples": len(self._data.train_labels),
            "augmentation": self._padding,
            "examples": digest(self._data.train_labels, self._data.test_labels),
            "partition": digest(*self.parts),
        }

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        data, p = self._data, self._padding
        padded = np.pad(data.train_images, ((0, 0), (p, p), (p, p), (0, 0)))
        tensors = {
            "train": torch.from_numpy(padded),
            "labels": torch.from_numpy(data.train_labels),
            "test": torch.from_numpy(data.test_images),
            "test_labels": torch.from_numpy(data.test_labels),
            "mean": self._mean,
            "scale": self._scale,
            "rows": torch.arange(self._size[0]),
            "columns": torch.arange(self._size[1]),
        }
        self._held = {name: tensor.to(device) for name, tensor in tensors.items()}
        self._dtype = dtype

    def tables(self, epoch: int) -> dict[str, npt.NDArray[np.generic]]:
        steps, batch = self.steps_per_epoch, self.batch_size
        index = batch_indices(self.parts, steps, batch, epoch, self.seed, _ORDER)
        tables: dict[str, npt.NDArray[np.generic]] = {"index": index}
        if self.augment:
            choices = np.empty((steps, self.num_workers, batch, 3), np.int64)
            limits = (2 * self._padding + 1, 2 * self._padding + 1, 2)
            for worker in range(self.num_workers):
                random = generator(self.seed, _CROP, worker, epoch)
                choices[:, worker] = random.integers(limits, size=(steps, batch, 3))
            tables["choices"] = choices
        return tables

    def batch(self, rows: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        held, index = self._held, rows["index"]
        if self.augment:
            down, across, flip = rows["choices"].unbind(-1)
            width = self._size[1]
            y = down[..., None] + held["rows"]
            columns = held["columns"]
            x = across[..., None] + torch.where(flip[..., None] > 0, width - 1 - columns, columns)
            pixels = held["train"][index[..., None, None], y[..., :, None], x[..., None, :]]
        else:
            pixels = held["train"][index]
        return self._normalised(pixels), held["labels"][index]

    def _normalised(self, pixels: Tensor) -> Tensor:
        # Channels stay last in memory, as the bytes are; only the axes are renamed.
        values = pixels.to(torch.float32).sub_(self._held["mean"]).mul_(self._held["scale"])
        values = values.to(self._dtype)
        return values.flatten(-3) if self.flat else values.movedim(-1, -3)

    def loss(
        self, model: nn.Module, inputs: Tensor, targets: Tensor, state: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Cross-entropy; one per worker where models and batches are stacked."""
        return mean_cross_entropy(model(inputs), targets, is_stacked=targets.dim() == 2), ()

    def evaluate(self, model: nn.Module) -> Evaluation:
        images, labels = self._held["test"], self._held["test_labels"]
        loss = torch.zeros((), dtype=torch.float64, device=images.device)
        hits = torch.zeros((), dtype=torch.long, device=images.device)
        for x, y in zip(torch.split(images, 2000), torch.split(labels, 2000), strict=True):
            scores = model(self._normalised(x)).to(torch.float32)
            loss += functional.cross_entropy(scores, y, reduction="sum")
            hits += (scores.argmax(-1) == y).sum()
        accuracy = float(hits) / len(labels)
        return Evaluation(loss=float(loss) / len(labels), accuracy=accuracy, examples=len(labels))

    def probabilities(self, model: nn.Module) -> Tensor:
        """Of the classes of the first held-out images."""
        return model(self._normalised(self._held["test"][:_JUDGED])).double().softmax(-1)  # type: ignore[no-any-return]

    def recalibration(self) -> Iterator[Tensor]:
        """Up to 2,048 training images in their middle position, the same each time."""
        held, p = self._held, self._padding
        number = len(held["labels"])
        chosen = generator(self.seed, _RECALIBRATION).permutation(number)[:2048]
        index = torch.from_numpy(chosen).to(held["labels"].device)
        for piece in torch.split(index, 512):
            pixels = held["train"][piece]
            height, width = self._size
            yield self._normalised(pixels[:, p : p + height, p : p + width])
