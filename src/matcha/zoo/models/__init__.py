"""The networks of the paper's experiments, and small ones for two CPU cores."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from matcha.errors import unknown_name
from matcha.training.task import Task, model_digest
from matcha.zoo.models.language import LanguageModel, Transformer
from matcha.zoo.models.vision import VGG11, VGG16, ResNet, SmallCNN, WideResNet, perceptron, resnet

MODELS: dict[str, Callable[[int], nn.Module]] = {
    "cnn": SmallCNN,
    "cnn-gn": lambda classes: SmallCNN(classes, groups=4),
    "perceptron": perceptron,
    "resnet8": lambda classes: resnet(8, classes),
    "resnet20": lambda classes: resnet(20, classes),
    "resnet20-gn": lambda classes: resnet(20, classes, groups=8),
    "resnet20-wide": lambda classes: resnet(20, classes, width=64),
    "resnet50": lambda classes: resnet(50, classes),
    "resnet18": ResNet.resnet18,
    "wideresnet28-10": lambda classes: WideResNet(28, 10, classes),
    "wideresnet16-4": lambda classes: WideResNet(16, 4, classes),
    "vgg11": VGG11,
    "vgg16": VGG16,
}
"""Image classifiers by name; each takes the number of classes."""


_SEEDING = threading.RLock()


def build(name: str, num_classes: int, seed: int = 0) -> nn.Module:
    """A new image classifier whose weights depend on the seed alone.

    >>> sum(p.numel() for p in build("resnet20", 10).parameters())
    272474
    """
    return seeded(maker(name, num_classes), seed)


def maker(name: str, num_classes: int) -> Callable[[], nn.Module]:
    """A function that makes new classifiers of a name, their weights from torch's generator."""
    if name not in MODELS:
        raise unknown_name("model", name, MODELS)
    return lambda: MODELS[name](num_classes)


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build a module with initial weights from the seed; torch's own generator is left alone."""
    # Threads share that generator: one at a time, or they would draw from each other's seed.
    with _SEEDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def mean_cross_entropy(scores: Tensor, targets: Tensor, *, is_stacked: bool) -> Tensor:
    """The mean over a batch; where batches of several workers are stacked, one per worker."""
    scores = scores.flatten(0, -2)
    if not is_stacked:
        return functional.cross_entropy(scores, targets.flatten())
    losses = functional.cross_entropy(scores, targets.flatten(), reduction="none")
    return losses.view(len(targets), -1).mean(1)


class ModelTask(Task):
    """A task of examples in batches, whose models a function makes: their weights from the seed."""

    def __init__(
        self, name: str, make: Callable[[], nn.Module], num_workers: int, batch_size: int, seed: int
    ) -> None:
        self.name, self.num_workers, self.seed = name, num_workers, seed
        self.batch_size, self._make = batch_size, make

    def model(self) -> nn.Module:
        """A new one with the initial weights."""
        return seeded(self._make, self.seed)

    def data(self) -> dict[str, Any]:
        """What tells the data, and how they are shared, from others; plain values."""
        raise NotImplementedError

    @cached_property
    def _digests(self) -> dict[str, Any]:
        return {**self.data(), "model": model_digest(self.model())}

    def identity(self) -> dict[str, Any]:
        """Model, data, and batch size."""
        return {"batch size": self.batch_size, **self._digests}


__all__ = [
    "MODELS",
    "VGG16",
    "LanguageModel",
    "ModelTask",
    "ResNet",
    "SmallCNN",
    "Transformer",
    "WideResNet",
    "build",
    "maker",
    "mean_cross_entropy",
    "perceptron",
    "resnet",
    "seeded",
]
