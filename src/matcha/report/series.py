"""Series for charts: curves, timelines and presence, thinned to what a page can show."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from matcha.plans import PlanLike
from matcha.records import MODEL_FIGURES, Record, Run, Span
from matcha.report.summary import values, worker_comm_seconds
from matcha.rounds import Round

METRICS = (*MODEL_FIGURES, "gradient_norm", "gradient_bound")
AXES = ("iteration", "epoch", "time", "comm_units", "megabytes_sent")


def thin(x: npt.ArrayLike, y: npt.ArrayLike, limit: int) -> npt.NDArray[np.int64]:
    """The positions of at most `limit` points that keep a curve's shape.

    Largest-triangle-three-buckets (Steinarsson, 2013): of each bucket, keep the point that spans
    the largest triangle with the point kept before it and the mean of the bucket after it. The
    first and last points always stay, and so does a lone spike.

    >>> thin(range(1000), [0.0] * 500 + [9.0] + [0.0] * 499, 10).tolist().count(500)
    1
    """
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    count = len(x)
    if count <= limit or limit < 3:
        return np.arange(count)
    edges = np.linspace(1, count - 1, limit - 1).astype(int)
    kept = [0]
    for bucket in range(limit - 2):
        start, stop = edges[bucket], edges[bucket + 1]
        after = slice(stop, edges[bucket + 2] if bucket + 2 < len(edges) else count)
        a, (cx, cy) = kept[-1], (x[after].mean(), y[after].mean())
        area = np.abs((x[a] - cx) * (y[start:stop] - y[a]) - (x[a] - x[start:stop]) * (cy - y[a]))
        kept.append(start + int(np.argmax(area)))
    return np.array([*kept, count - 1])


def curves(*samples: Sequence[Record], limit: int = 400) -> dict[str, dict[str, list[Any]]]:
    """Each metric that records hold: its values `y` beside every horizontal axis.

    Of runs that differ in their seed, the means over the iterations that each of them recorded,
    with `low` and `high` a standard deviation off.
    """
    found = {}
    for metric in METRICS:
        # A run that diverges stays on the page: its curve ends at the last finite value.
        each = [{r.iteration: r for r, _ in values(records, metric)} for records in samples]
        shared = sorted(set.intersection(*map(set, each)))
        if not shared:
            continue
        y = np.array([[getattr(rs[k], metric) for rs in each] for k in shared], dtype=float)
        mean = y.mean(axis=1)
        kept = thin(shared, mean, limit)
        lines: dict[str, list[Any]] = {
            axis: [_mean([getattr(rs[shared[i]], axis) for rs in each]) for i in kept]
            for axis in AXES
        }
        lines["y"] = [short(value) for value in mean[kept].tolist()]
        if len(samples) > 1:
            spread = y.std(axis=1, ddof=1)
            low = np.maximum(mean - spread, mean / 10)  # on logarithmic scales it must not be zero
            lines["low"] = [short(value) for value in low[kept].tolist()]
            lines["high"] = [short(value) for value in (mean + spread)[kept].tolist()]
        found[metric] = lines
    return found


def _mean(values: Sequence[float | None]) -> float | int | None:
    """The mean of all; None where one is not known."""
    known = [value for value in values if value is not None]
    return short(sum(known) / len(known)) if len(known) == len(values) else None


def short(value: float | None, digits: int = 5) -> float | int | None:
    """A number with few digits, since a page is read and not computed with; None if not finite.

    >>> short(0.123456789), short(2.0), short(float("nan"))
    (0.12346, 2, None)
    """
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


KINDS = ("compute", "exchange", "wait")
MAX_SPANS = 1_500
_MAX_ROUNDS = 2_000


def timeline(run: Run, limit: int = MAX_SPANS) -> dict[str, Any] | None:
    """The run's first rounds, as many as `limit` spans allow, as columns for the page.

    Where a run recorded no spans the plan's own schedule is drawn, in the delay model's unit, and
    `planned` says so. None when there is neither.
    """
    planned = not run.spans
    spans = (
        _planned_spans(run, limit)
        if planned
        else _without_evaluations(_first_rounds(run.spans, limit), run.records)
    )
    if not spans:
        return None
    origin = min(s.start for s in spans)
    return {
        "planned": planned,
        "unit": run.plan.timing.unit if planned and run.plan else "seconds",
        "rounds": [spans[0].iteration, max(s.iteration for s in spans)],
        "worker": [s.worker for s in spans],
        "iteration": [s.iteration for s in spans],
        "kind": [KINDS.index(s.kind) for s in spans],
        "start": [short(s.start - origin) for s in spans],
        "length": [short(s.end - s.start) for s in spans],
    }


def worker_loads(run: Run) -> dict[str, list[float | int | None]]:
    """Each worker's communication per iteration (Figure 1b): by the plan, and as measured.

    Planned, a worker is busy for the matchings it takes part in, averaged over the rounds run.
    """
    loads = {}
    iterations = max((r.iteration for r in run.records), default=0)
    if run.plan is not None:
        rounds = min(iterations or _MAX_ROUNDS, _MAX_ROUNDS)
        busy = [0.0] * run.plan.num_workers
        for round_ in run.plan.rounds(0, rounds):
            for who, duration in _parts(run.plan, round_):
                for worker in who:
                    busy[worker] += duration
        loads["planned"] = [short(b / rounds) for b in busy]
    seconds = worker_comm_seconds(run)
    if seconds and iterations:
        workers = range(run.header.num_workers)
        loads["measured"] = [short(seconds.get(w, 0.0) / iterations) for w in workers]
    return loads


def _parts(plan: PlanLike, round_: Round) -> Iterator[tuple[list[int], float]]:
    """Which workers are busy for how long, one part of a round after another."""
    if round_.is_all_reduce and round_:
        yield list(range(plan.num_workers)), plan.round_time(round_)
        return
    for matching in round_.matchings:
        workers = sorted(end for link in matching for end in link)
        yield workers, plan.timing.matching_time(matching)


def _without_evaluations(spans: Sequence[Span], records: Sequence[Record]) -> list[Span]:
    """The spans without the stretches between epochs without any training.

    Models are evaluated and saved there, off the run's clock: drawn, they would be idle time.
    """
    kept = list(spans)
    for done in sorted({record.iteration for record in records}):
        before = max((span.end for span in kept if span.iteration < done), default=math.inf)
        after = min((span.start for span in kept if span.iteration >= done), default=0.0)
        if (pause := after - before) > 0:
            kept = [
                replace(span, start=span.start - pause, end=span.end - pause)
                if span.iteration >= done
                else span
                for span in kept
            ]
    return kept


def _first_rounds(spans: Sequence[Span], limit: int) -> list[Span]:
    """Whole rounds from the first on, at most `limit` spans of them."""
    ordered = sorted(spans, key=lambda s: (s.iteration, s.worker, s.start))
    if len(ordered) <= limit:
        return ordered
    cut = ordered[limit].iteration
    return [s for s in ordered[:limit] if s.iteration < cut] or ordered[:limit]


def _planned_spans(run: Run, limit: int) -> list[Span]:
    """The schedule itself: rounds end to end, matchings one after another, no computation."""
    if run.plan is None:
        return []
    spans: list[Span] = []
    clock = 0.0
    for k, round_ in enumerate(run.plan.rounds(0, _MAX_ROUNDS)):
        for workers, duration in _parts(run.plan, round_):
            end = clock + duration
            spans += [
                Span(worker=w, iteration=k, kind="exchange", start=clock, end=end) for w in workers
            ]
            clock = end
        if len(spans) >= limit:
            break
    return spans[:limit]


def presence(run: Run) -> dict[str, Any] | None:
    """The stretches of iterations that workers were away for, as columns for the page.

    None where no worker came or went. An end that is None is the end of the run.
    """
    changes = sorted(tuple(c) for record in run.records for c in record.changes or ())
    if not changes:
        return None
    gone: dict[int, int] = {}
    away: list[tuple[int, int, int | None]] = []
    for iteration, worker, is_there in changes:
        # Two may have written it down, each as it learnt it: the first word counts.
        if not is_there:
            gone.setdefault(worker, iteration)
        elif worker in gone:
            away.append((worker, gone.pop(worker), iteration))
    away += [(worker, since, None) for worker, since in gone.items()]
    away.sort(key=lambda stretch: stretch[:2])
    return {
        "iterations": max(record.iteration for record in run.records),
        "worker": [worker for worker, _, _ in away],
        "start": [since for _, since, _ in away],
        "stop": [until for _, _, until in away],
    }
