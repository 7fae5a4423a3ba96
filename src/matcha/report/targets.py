"""Targets: when a run reached a loss, and stayed there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matcha.records import Record, Run, has_diverged
from matcha.training.targets import arrival
from matcha.training.targets import lowest_held as lowest

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
    found = arrival([loss for _, loss in known], target)
    if found is None:
        return None
    place, share = found
    return _between(known[max(place - 1, 0)][0], known[place][0], share)


def lowest_held(run: Run, objective: str) -> float | None:
    """The lowest loss that two evaluations in a row were at or below; None without two.

    It is the lowest target that `reached` says the run reached.
    """
    return lowest([loss for _, loss in values(run, objective)])


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
        if any(map(has_diverged, losses)):
            return record.iteration
    return None


def _between(earlier: Record, record: Record, share: float) -> Moment:
    return Moment(
        time=earlier.time + share * (record.time - earlier.time),
        epoch=earlier.epoch + share * (record.epoch - earlier.epoch),
        comm_units=earlier.comm_units + share * (record.comm_units - earlier.comm_units),
    )
