"""Targets: when a run reached a loss, and stayed there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from matcha.records import Record, Run, is_lost

OBJECTIVES = ("train_loss", "test_loss")
"""Losses of the average model, the one that decides first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Where a run's curve meets the target: between two evaluations, by a straight line."""

    time: float
    epoch: float
    comm_units: float


def values(run: Run, metric: str) -> list[tuple[Record, float]]:
    """The records that hold a metric, with its finite values."""
    return [
        (record, value)
        for record in run.records
        if (value := getattr(record, metric)) is not None and math.isfinite(value)
    ]


def reached(run: Run, objective: str | None, target: float | None) -> Moment | None:
    """When the run's loss fell to the target and was still there at the next evaluation.

    One evaluation below the target may be luck, so two in a row are asked for. The moment lies
    between the evaluation before and the first of the two, by a straight line.
    """
    if objective is None or target is None:
        return None
    known = values(run, objective)
    for place in range(len(known) - 1):
        if known[place][1] <= target and known[place + 1][1] <= target:
            return _between(known[place - 1] if place else None, known[place], target)
    return None


def lowest_held(run: Run, objective: str) -> float | None:
    """The lowest loss that two evaluations in a row were at or below; None without two.

    It is the lowest target that `reached` says the run reached.
    """
    known = [value for _, value in values(run, objective)]
    return min(map(max, pairwise(known)), default=None)


def common_target(runs: Sequence[Run], objective: str) -> float | None:
    """The lowest target that every one of the runs reached."""
    held = [lowest_held(run, objective) for run in runs]
    known = [loss for loss in held if loss is not None]
    return max(known) if known and len(known) == len(held) else None


def diverged_at(run: Run, objective: str | None) -> int | None:
    """The first iteration recorded with a loss that is lost, of the workers or the average."""
    metrics = ("worker_loss", objective) if objective else ("worker_loss",)
    for record in run.records:
        losses = [value for name in metrics if (value := getattr(record, name)) is not None]
        if any(map(is_lost, losses)):
            return record.iteration
    return None


def _between(before: tuple[Record, float] | None, after: tuple[Record, float], at: float) -> Moment:
    record, loss = after
    if before is None or before[1] <= at:
        return Moment(time=record.time, epoch=record.epoch, comm_units=record.comm_units)
    earlier, share = before[0], (before[1] - at) / (before[1] - loss)
    return Moment(
        time=earlier.time + share * (record.time - earlier.time),
        epoch=earlier.epoch + share * (record.epoch - earlier.epoch),
        comm_units=earlier.comm_units + share * (record.comm_units - earlier.comm_units),
    )
