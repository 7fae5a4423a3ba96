"""Summaries: what each choice came to at a target."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from matcha.records import Record, Run, arrival, has_diverged, lowest_held
from matcha.report.verdict import Summary, accuracy_gap, is_sooner
from matcha.strategies import is_control

OBJECTIVES = ("train_loss", "test_loss")
"""Losses of the average model, the one that decides first."""


class Moment(NamedTuple):
    """Where a run's loss meets the target: between two evaluations, by a straight line."""

    time: float
    epoch: float
    comm_units: float
    at_first_evaluation: bool = False


def values(records: Sequence[Record], metric: str) -> list[tuple[Record, float]]:
    """The records that hold a metric, with its finite values."""
    return [
        (record, value)
        for record in records
        if (value := getattr(record, metric)) is not None and math.isfinite(value)
    ]


def find_moment(run: Run, objective: str | None, target: float | None) -> Moment | None:
    """When the run's loss fell to the target and was still there at the next evaluation."""
    if objective is None or target is None:
        return None
    known = values(run.records, objective)
    found = arrival([loss for _, loss in known], target)
    if found is None:
        return None
    place, share = found
    before, after = known[max(place - 1, 0)][0], known[place][0]
    return Moment(
        time=before.time + share * (after.time - before.time),
        epoch=before.epoch + share * (after.epoch - before.epoch),
        comm_units=before.comm_units + share * (after.comm_units - before.comm_units),
        at_first_evaluation=place == 0,
    )


def common_target(runs: Sequence[Run], objective: str) -> float | None:
    """The lowest target that every one of the runs held."""
    held = [lowest_held([loss for _, loss in values(run.records, objective)]) for run in runs]
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


def choose_target(
    runs: Sequence[Run], target_loss: float | None = None
) -> tuple[str | None, float | None, bool]:
    """Which loss decides, the target at which runs are compared, and whether it was asked for."""
    # Runs that diverged or recorded nothing yet do not take the comparison from the others.
    able = [run for run in runs if run.records and diverged_at(run, None) is None]
    known = (loss for loss in OBJECTIVES if able and all(values(run.records, loss) for run in able))
    objective = next(known, None)
    asked = {run.header.setting("target_loss") for run in runs}
    target = next(iter(asked)) if target_loss is None and len(asked) == 1 else target_loss
    if target is not None or objective is None:
        return objective, target, target is not None
    told = [run for run in runs if values(run.records, objective)]
    sound = [run for run in told if diverged_at(run, objective) is None] or told
    # A control must not make the target easy.
    talking = [
        run
        for run in sound
        if not is_control(run.header.strategy) and run.records[-1].megabytes_sent != 0
    ]
    return objective, common_target(talking or sound, objective), False


def worker_comm_seconds(run: Run, until: float = math.inf) -> dict[int, float]:
    """Each worker's seconds of communication up to a moment: recorded, or else from its spans."""
    recorded = {
        worker: _comm_seconds(records, until)
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


def _comm_seconds(records: Sequence[Record], until: float) -> float:
    """Seconds of communication up to a moment; of the record that it falls into, its share."""
    total, before = 0.0, 0.0
    for record in records:
        length = record.time - before
        share = min(1.0, (until - before) / length) if length > 0 else float(until >= before)
        total += max(0.0, share) * (record.comm_seconds or 0.0)
        before = record.time
    return total


_LAST = (
    *("train_loss", "train_loss_error", "worker_loss", "test_loss", "test_accuracy"),
    *("consensus_distance", "function_distance"),
)
"""What a run is said to have come to: its last record of each."""
_AVERAGED = (
    *("epochs", "time", *_LAST, "comm_units", "megabytes_sent", "comm_seconds"),
    *("time_to_target", "epochs_to_target"),
)


def summarise(
    runs: Sequence[Run], label: str, objective: str | None, target: float | None
) -> Summary:
    """What a choice came to: the means over its runs, which differ in their seed."""
    each = [_summarise_run(run, label, objective, target) for run in runs]
    if len(each) == 1:
        return each[0]
    means: dict[str, Any] = {}
    deviations = {}
    for name in _AVERAGED:
        known = [value for row in each if (value := getattr(row, name)) is not None]
        # A time to target is the choice's only if all of its runs reached it.
        means[name] = statistics.fmean(known) if len(known) == len(each) else None
        if means[name] is not None and all(map(math.isfinite, known)):
            deviations[name] = statistics.stdev(known)
    sampling = math.sqrt(sum((row.accuracy_error or 0.0) ** 2 for row in each)) / len(each)
    spread = deviations.get("test_accuracy", 0.0) / math.sqrt(len(each))
    return replace(
        each[0],
        **means,
        seeds=len(each),
        accuracy_error=math.hypot(sampling, spread),
        at_first_evaluation=any(row.at_first_evaluation for row in each),
        diverged_at=next((row.diverged_at for row in each if row.diverged_at is not None), None),
        deviations=deviations,
    )


def _summarise_run(run: Run, label: str, objective: str | None, target: float | None) -> Summary:
    hit = find_moment(run, objective, target)
    records = run.records or (Record(iteration=0, epoch=0.0),)
    until = hit.time if hit else math.inf
    seconds = worker_comm_seconds(run, until)
    mean = sum(seconds.values()) / len(seconds) if seconds else None
    if mean is None and any(r.comm_seconds is not None for r in records):
        mean = _comm_seconds(records, until)

    def last(metric: str) -> Any:
        known = (value for r in reversed(records) if (value := getattr(r, metric)) is not None)
        return next(known, None)

    return Summary(
        label=label,
        strategy=run.header.strategy,
        budget=run.header.budget,
        wire=run.header.wire,
        momentum=run.header.momentum,
        clock=run.header.clock,
        unit="units" if run.plan is None else run.plan.timing.unit,
        seeds=1,
        iterations=records[-1].iteration,
        epochs=records[-1].epoch,
        time=records[-1].time,
        **{name: last(name) for name in _LAST},
        accuracy_error=last("test_accuracy_error"),
        comm_units=(hit or records[-1]).comm_units,
        megabytes_sent=records[-1].megabytes_sent,
        comm_seconds=mean,
        time_to_target=hit.time if hit else None,
        epochs_to_target=hit.epoch if hit else None,
        at_first_evaluation=hit is not None and hit.at_first_evaluation,
        diverged_at=diverged_at(run, objective),
    )


def with_speedups(rows: Sequence[Summary]) -> list[Summary]:
    """The rows with how many times sooner than vanilla and all-reduce each was."""

    def times_sooner(row: Summary, strategy: str) -> float | None:
        # Messages of whole models first: that is what people run.
        named = sorted(
            (r for r in rows if r.strategy == strategy), key=lambda r: r.wire != "float32"
        )
        if not named or named[0].time_to_target is None or not row.time_to_target:
            return None
        if row.idle or row.diverged_at is not None or accuracy_gap(row, named[0]) is not None:
            return None  # a factor is a verdict too
        if row is not named[0] and not (is_sooner(row, named[0]) or is_sooner(named[0], row)):
            return None
        return named[0].time_to_target / row.time_to_target

    return [
        replace(
            row,
            speedup=times_sooner(row, "vanilla"),
            speedup_over_allreduce=times_sooner(row, "allreduce"),
        )
        for row in rows
    ]
