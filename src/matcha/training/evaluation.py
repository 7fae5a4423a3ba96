"""Evaluation of the average model: its loss on all training data, and on held-out data.

The average model is what training is for. A worker's own model on its own data can look perfect
without a word exchanged, so that loss is recorded beside it and decides nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from matcha.training.settings import Settings
from matcha.training.task import Evaluation, KnownLoss, KnownOutputs, Task, first_batches

SAMPLE = 10_000
"""Training examples (or words) on which the average model is tried, the same in every epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """The average model at one moment, off the clock."""

    train_loss: float
    """Over all workers' training data, or the sample of it that stands for them."""
    train_loss_error: float
    """Its standard error; 0 where all data were tried."""
    test: Evaluation

    def fields(self) -> dict[str, Any]:
        """The fields of a record."""
        return {
            "train_loss": self.train_loss,
            "train_loss_error": self.train_loss_error,
            "test_loss": self.test.loss,
            "test_accuracy": self.test.accuracy,
            "test_accuracy_error": self.test.accuracy_error,
        }


def score(
    model: nn.Module, task: Task, settings: Settings, batches: Sequence[float] | None = None
) -> Score:
    """A finished average model on training and held-out data.

    `batches` are its losses on the training sample, where workers have shared out the work.
    """
    with torch.no_grad(), settings.execution.autocast():
        test = task.evaluate(model)
    if isinstance(task, KnownLoss):
        return Score(train_loss=task.training_loss(model), train_loss_error=0.0, test=test)
    if batches is None:
        batches = sample_losses(model, task, settings)
    mean, error = _estimate(batches, task.steps_per_epoch * task.num_workers)
    return Score(train_loss=mean, train_loss_error=error, test=test)


def sample_losses(
    model: nn.Module, task: Task, settings: Settings, workers: Iterable[int] | None = None
) -> list[float]:
    """The average model's loss on each batch of a fixed sample of the workers' training data.

    The sample is what the first epoch would draw, every worker's share of it, cut at `SAMPLE`
    examples: the same for every strategy, epoch and engine.
    """
    if isinstance(task, KnownLoss):
        return []
    device = torch.device(settings.execution.device)
    chosen = list(range(task.num_workers) if workers is None else workers)
    states = {w: tuple(t.to(device) for t in task.initial_state()) for w in chosen}
    losses: list[float] = []
    seen = 0
    with torch.no_grad(), settings.execution.autocast():
        for inputs, targets in first_batches(task, device):
            for w in chosen:
                loss, states[w] = task.loss(model, inputs[w], targets[w], states[w])
                losses.append(float(loss))
            seen += targets.numel()
            if seen >= SAMPLE:
                break
    return losses


def _estimate(batches: Sequence[float], available: int) -> tuple[float, float]:
    """The mean of batch losses and its standard error, of a sample without replacement.

    >>> _estimate([1.0, 3.0], available=2)
    (2.0, 0.0)
    """
    mean = statistics.fmean(batches)
    if len(batches) < 2 or len(batches) >= available or not math.isfinite(mean):
        return mean, 0.0
    share = len(batches) / available
    return mean, statistics.stdev(batches) * math.sqrt((1 - share) / len(batches))


def finish_average(model: nn.Module, task: Task, settings: Settings) -> nn.Module:
    """Give the average of the workers' models the BatchNorm statistics that the settings want."""
    model.eval()
    if settings.statistics == "recalibrated":
        with torch.no_grad(), settings.execution.autocast():
            recalibrate(model, task.recalibration())
    return model


def outputs(model: nn.Module, task: Task, settings: Settings) -> Tensor | None:
    """A worker's own class probabilities on the task's fixed batch; None without classes."""
    if not isinstance(task, KnownOutputs):
        return None
    model.eval()
    with torch.no_grad(), settings.execution.autocast():
        return task.probabilities(model)


def divergence(own: Tensor, mean: Tensor) -> float:
    """The mean Kullback–Leibler divergence of class probabilities from all workers' mean, in nats.

    Its mean over workers is their Jensen–Shannon divergence, whose root is their distance.

    >>> own = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    >>> round(divergence(own, torch.tensor([[0.5, 0.5], [0.5, 0.5]])), 4)  # half of log 2
    0.3466
    """
    return float((torch.special.xlogy(own, own) - torch.special.xlogy(own, mean)).sum(-1).mean())


def function_distance(divergences: Sequence[float]) -> float:
    """The workers' Jensen–Shannon distance: how far apart what they answer is."""
    return math.sqrt(max(0.0, statistics.fmean(divergences)))


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
