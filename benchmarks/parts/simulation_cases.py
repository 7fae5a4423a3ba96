"""Models, workers and data of the simulation's benchmark, with the bars of the issue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from matcha.simulation import SGD
from matcha.zoo.data import Images, Text, partition
from matcha.zoo.images import ImageTask
from matcha.zoo.language import LanguageTask
from matcha.zoo.models import LanguageModel, SmallCNN, build

OPTIMIZER = SGD(momentum=0.9, nesterov=True, weight_decay=1e-4)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and its workers, with the bars of the issue."""

    name: str
    num_workers: int
    batch_size: int = 64
    over_loop: float | None = None
    over_whole: float | None = 0.75
    compiled: bool = False


CUDA_CASES = [
    Case(name="resnet20", num_workers=16, over_loop=12, compiled=True),
    Case(name="resnet20", num_workers=8, over_loop=12),
    Case(name="resnet20-wide", num_workers=16, over_loop=6, compiled=True),
    Case(name="resnet20-wide", num_workers=8, over_loop=6),
    Case(name="resnet18", num_workers=8, over_loop=3.5, compiled=True),
    Case(name="resnet18", num_workers=16, over_loop=3.5, compiled=True),
    Case(name="lstm", num_workers=8, batch_size=10, over_loop=2, over_whole=None),
    Case(name="resnet50", num_workers=16, over_whole=None, compiled=True),
    Case(name="wideresnet28-10", num_workers=8, over_whole=None),
]
CPU_CASES = [
    Case(name="digits-cnn", num_workers=8, batch_size=16, over_loop=1, over_whole=None),
    Case(name="digits-linear", num_workers=8, batch_size=16, over_loop=1, over_whole=None),
    Case(name="digits-mlp", num_workers=8, batch_size=16, over_loop=1, over_whole=None),
    Case(name="resnet8", num_workers=8, batch_size=16, over_loop=1, over_whole=None),
]


def images(size: int, channels: int, number: int) -> Images:
    random = np.random.default_rng(0)
    shape = (number, size, size, channels)
    return Images(
        train_images=random.integers(0, 256, shape, dtype=np.uint8),
        train_labels=random.integers(0, 10, number),
        test_images=random.integers(0, 256, (64, *shape[1:]), dtype=np.uint8),
        test_labels=random.integers(0, 10, 64),
        num_classes=10,
    )


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def task_of(case: Case) -> Any:
    if case.name == "lstm":
        words = np.random.default_rng(0).integers(0, 10_000, 200_000)
        text = Text(train=words, valid=words[:1000], test=words[:1000], vocabulary=())
        return LanguageTask(
            "lstm", text, case.num_workers, LanguageModel, batch_size=case.batch_size
        )
    digits = case.name.startswith("digits")
    data = images(8, 1, 2048) if digits else images(32, 3, 64 * 64 * 4)
    makers: dict[str, Callable[[], nn.Module]] = {
        "digits-cnn": lambda: SmallCNN(10),
        "digits-linear": lambda: nn.Linear(64, 10),
        "digits-mlp": _mlp,
    }
    make = makers.get(case.name, lambda: build(case.name, 10))
    return ImageTask(
        case.name,
        data,
        partition(data.train_labels, case.num_workers),
        make,
        batch_size=case.batch_size,
        augment=not digits,
        flat=case.name in ("digits-linear", "digits-mlp"),
    )
