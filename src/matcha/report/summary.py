"""Summaries: a run in one row, and runs compared at an equal target."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from matcha.records import Record, Run
from matcha.strategies import with_budget

OBJECTIVES = ("train_loss", "test_loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What one run came to, and what it took to reach the target."""

    label: str
    strategy: str
    budget: float
    clock: str
    unit: str
    """The unit of `comm_units`."""
    iterations: int
    epochs: float
    time: float
    """Seconds on the run's clock, start to end."""
    train_loss: float | None
    test_loss: float | None
    test_accuracy: float | None
    consensus_distance: float | None
    comm_units: float
    comm_seconds: float | None
    """The mean worker's seconds of communication, to the target where it was reached."""
    time_to_target: float | None
    """None: the run never reached it."""
    epochs_to_target: float | None
    diverged_at: int | None
    """The iteration at which the objective stopped being a number."""
    speedup: float | None = None
    """Vanilla's time to target over this run's; vanilla itself has 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Runs side by side at an equal target."""

    objective: str | None
    """Which loss the target is of; None where no run recorded one."""
    target: float | None
    given: bool
    """Whether the target was asked for, rather than the lowest loss that every run reached."""
    rows: tuple[Summary, ...]
    winner: int | None = None
    """The row that reached the target first; None where no row may be called that."""


def compare(runs: Sequence[Run], target: float | None = None) -> Comparison:
    """Summarise runs at an equal target loss.

    Args:
        runs: The runs.
        target: The loss to reach. By default what the runs' own configuration calls
            `target_loss`, or else the lowest loss that every run reached (but those that diverged).
    """
    known = [o for o in OBJECTIVES if runs and all(_values(run, o) for run in runs)]
    objective = known[0] if known else None
    asked = {run.header.setting("target_loss") for run in runs}
    if target is None and len(asked) == 1:
        target = next(iter(asked))
    given = target is not None
    if target is None and objective is not None:
        sound = [run for run in runs if diverged_at(run, objective) is None] or runs
        lowest = [min(v for _, v in _values(run, objective)) for run in sound]
        target = max(lowest, default=None)
    labels = label_runs(runs)
    rows = [
        _summarise(run, label, objective, target) for run, label in zip(runs, labels, strict=True)
    ]
    timed = [number for number, row in enumerate(rows) if row.time_to_target is not None]
    return Comparison(
        objective=objective,
        target=target,
        given=given,
        rows=tuple(_with_speedups(rows)),
        winner=min(timed, key=lambda n: rows[n].time_to_target or 0.0, default=None),
    )


def label_runs(runs: Sequence[Run]) -> list[str]:
    """A short, distinct name for each run: its strategy, and only what sets it apart."""
    headers = [run.header for run in runs]
    labels = [h.strategy for h in headers]
    if len(set(labels)) < len(labels):
        labels = [with_budget(h.strategy, h.budget) for h in headers]
    if len(set(labels)) < len(labels):
        # A name that only adds to the label says best what is different.
        labels = [
            h.name if h.name.startswith(f"{label}, ") else label
            for h, label in zip(headers, labels, strict=True)
        ]
    for extras in ([f"seed {h.seed}" for h in headers], [h.name for h in headers]):
        ways: dict[str, set[str]] = {}
        for label, extra in zip(labels, extras, strict=True):
            ways.setdefault(label, set()).add(extra)
        labels = [
            f"{label}, {extra}" if len(ways[label]) > 1 else label
            for label, extra in zip(labels, extras, strict=True)
        ]
    counts: Counter[str] = Counter()
    for i, label in enumerate(labels):
        counts[label] += 1
        labels[i] = label if counts[label] == 1 else f"{label} ({counts[label]})"
    return labels


def reached(run: Run, objective: str | None, target: float | None) -> Record | None:
    """The run's first record at or below the target."""
    if objective is None or target is None:
        return None
    return next((r for r, value in _values(run, objective) if value <= target), None)


def worker_comm_seconds(run: Run, until: float = math.inf) -> dict[int, float]:
    """Each worker's seconds of communication up to a moment: recorded, or else from its spans."""
    recorded = {
        worker: sum(r.comm_seconds or 0.0 for r in records if r.time <= until)
        for worker, records in run.worker_records.items()
        if any(r.comm_seconds is not None for r in records)
    }
    if recorded:
        return recorded
    spans: dict[int, float] = {}
    for span in run.spans:
        if span.kind == "exchange" and span.start <= until:
            spans[span.worker] = spans.get(span.worker, 0.0) + span.end - span.start
    return spans


def _summarise(run: Run, label: str, objective: str | None, target: float | None) -> Summary:
    hit = reached(run, objective, target)
    last = run.records[-1] if run.records else Record(iteration=0, epoch=0.0)
    seconds = worker_comm_seconds(run, hit.time if hit else math.inf)
    mean = sum(seconds.values()) / len(seconds) if seconds else None
    if mean is None and any(r.comm_seconds is not None for r in run.records):
        until = hit.time if hit else math.inf
        mean = sum(r.comm_seconds or 0.0 for r in run.records if r.time <= until)
    return Summary(
        label=label,
        strategy=run.header.strategy,
        budget=run.header.budget,
        clock=run.header.clock,
        unit="units" if run.plan is None else run.plan.timing.unit,
        iterations=last.iteration,
        epochs=last.epoch,
        time=last.time,
        train_loss=_last(run, "train_loss"),
        test_loss=_last(run, "test_loss"),
        test_accuracy=_last(run, "test_accuracy"),
        consensus_distance=_last(run, "consensus_distance"),
        comm_units=(hit or last).comm_units,
        comm_seconds=mean,
        time_to_target=None if hit is None else hit.time,
        epochs_to_target=None if hit is None else hit.epoch,
        diverged_at=diverged_at(run, objective),
    )


def diverged_at(run: Run, objective: str | None) -> int | None:
    """The first iteration recorded with a value that is no number."""
    if objective is None:
        return None
    values = ((r.iteration, getattr(r, objective)) for r in run.records)
    return next((k for k, value in values if value is not None and not math.isfinite(value)), None)


def _with_speedups(rows: list[Summary]) -> list[Summary]:
    from dataclasses import replace

    base = next((r.time_to_target for r in rows if r.strategy == "vanilla"), None)
    if base is None:
        return rows
    return [replace(r, speedup=base / r.time_to_target) if r.time_to_target else r for r in rows]


def _values(run: Run, metric: str) -> list[tuple[Record, float]]:
    return [
        (r, value)
        for r in run.records
        if (value := getattr(r, metric)) is not None and math.isfinite(value)
    ]


def _last(run: Run, metric: str) -> float | None:
    return next(
        (value for r in reversed(run.records) if (value := getattr(r, metric)) is not None), None
    )
