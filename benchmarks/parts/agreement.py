"""How far apart the same short run is on two devices, or in two kinds of numbers."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from typing import Any

import numpy as np
import torch
from parts.simulation_cases import OPTIMIZER, images

import matcha
from matcha.records import Record
from matcha.simulation import Delays, Execution, Settings, Simulation, StepDecay
from matcha.zoo.data import Text, partition
from matcha.zoo.images import ImageTask
from matcha.zoo.language import LanguageTask
from matcha.zoo.models import LanguageModel, build


def _tasks() -> dict[str, Callable[[], Any]]:
    words = np.random.default_rng(0).integers(0, 100, 4000)
    text = Text(train=words, valid=words[:500], test=words[:500], vocabulary=())
    data = images(32, 3, 4 * 8 * 6)
    return {
        "resnet8": lambda: ImageTask(
            "resnet8", data, partition(data.train_labels, 4), lambda: build("resnet8", 10),
            batch_size=8, augment=True,
        ),
        "lstm": lambda: LanguageTask(
            "lstm", text, 4, lambda: LanguageModel(100, 32, dropout=0.0), batch_size=8, length=20
        ),
    }  # fmt: skip


def run(name: str, overlap: bool, execution: Execution) -> list[Record]:
    settings = Settings(
        epochs=2,
        schedule=StepDecay(base=0.05, milestones=(1,)),
        optimizer=OPTIMIZER,
        overlap=overlap,
        delays=Delays(compute_time=1.0),
        execution=execution,
    )
    plan = matcha.plan(matcha.families.ring(4), 0.5, "periodic")
    return list(Simulation(_tasks()[name](), plan, settings))


@cache
def reference(name: str, overlap: bool) -> list[Record]:
    """The run in float32 on the CPU, one model after another."""
    return run(name, overlap, Execution(batching="loop"))


def compare(name: str, overlap: bool, other: Execution) -> dict[str, Any]:
    result: dict[str, Any] = {"task": name, "overlap": overlap}
    try:
        runs = (reference(name, overlap), run(name, overlap, other))
        pairs = list(zip(*(map(asdict, records) for records in runs), strict=True))
        result["worst"] = {
            key: max(abs(a[key] - b[key]) / max(abs(a[key]), 1e-12) for a, b in pairs)
            for key in pairs[0][0]
            if pairs[0][0][key] is not None
        }
        result["agrees"] = all(
            value < 0.02 for key, value in result["worst"].items() if key != "test_accuracy"
        )
    except Exception:
        result["failed"] = traceback.format_exc()
    return result


def agreement(other: Execution) -> list[dict[str, Any]]:
    """The same short run, in float32 on the CPU and as `other` does it: how far apart are they?"""
    torch.backends.cudnn.allow_tf32 = False
    results = [compare(name, overlap, other) for name in _tasks() for overlap in (False, True)]
    torch.backends.cudnn.allow_tf32 = True
    return results
