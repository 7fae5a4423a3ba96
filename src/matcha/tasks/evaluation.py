"""Evaluation of the average model: its BatchNorm statistics first, then its loss."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from matcha.tasks.settings import Settings
from matcha.tasks.task import Evaluation, Task


def finish_average(model: nn.Module, task: Task, settings: Settings) -> nn.Module:
    """Give the average of the workers' models the BatchNorm statistics that the settings want."""
    model.eval()
    if settings.statistics == "recalibrated":
        with torch.no_grad(), settings.execution.autocast():
            recalibrate(model, task.recalibration())
    return model


def evaluate(model: nn.Module, task: Task, settings: Settings) -> Evaluation:
    """A finished average model on held-out data."""
    with torch.no_grad(), settings.execution.autocast():
        return task.evaluate(model)


def recalibrate(model: nn.Module, batches: Iterable[Tensor]) -> None:
    """Measure a model's BatchNorm statistics again: the mean over the given batches.

    The average of models is a model whose layers see inputs none of them saw, so the average of
    their statistics is not its own.
    """
    layers = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if not layers:
        return
    kept = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # a cumulative mean
        layer.train()
    for inputs in batches:
        model(inputs)
    for layer, momentum in zip(layers, kept, strict=True):
        layer.momentum = momentum
        layer.eval()
