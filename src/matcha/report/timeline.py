"""Timelines: which worker was busy, talking or waiting, and when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from matcha.plans import PlanLike
from matcha.records import Run, Span
from matcha.report.series import short
from matcha.report.summary import worker_comm_seconds
from matcha.rounds import Round

KINDS = ("compute", "exchange", "wait")
MAX_SPANS = 1_500
_MAX_ROUNDS = 2_000


def timeline(run: Run, limit: int = MAX_SPANS) -> dict[str, Any] | None:
    """The run's first rounds, as many as `limit` spans allow, as columns for the page.

    Where a run recorded no spans the plan's own schedule is drawn, in the delay model's unit, and
    `planned` says so. None when there is neither.
    """
    planned = not run.spans
    spans = _planned_spans(run, limit) if planned else _first_rounds(run.spans, limit)
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
    """Each worker's communication an iteration (Figure 1b): by the plan, and as measured.

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
    """Who is busy for how long, one part of a round after another."""
    if round_.is_all_reduce and round_:
        yield list(range(plan.num_workers)), plan.round_time(round_)
        return
    for matching in round_.matchings:
        workers = sorted(end for link in matching for end in link)
        yield workers, plan.timing.matching_time(matching)


def _first_rounds(spans: Sequence[Span], limit: int) -> list[Span]:
    """Whole rounds from the first on, at most `limit` spans of them."""
    ordered = sorted(spans, key=lambda s: (s.iteration, s.worker, s.start))
    if len(ordered) <= limit:
        return ordered
    cut = ordered[limit].iteration
    kept = [s for s in ordered[:limit] if s.iteration < cut]
    return kept or ordered[:limit]


def _planned_spans(run: Run, limit: int) -> list[Span]:
    """The schedule itself: rounds end to end, matchings one after another, no computation."""
    if run.plan is None:
        return []
    spans: list[Span] = []
    clock = 0.0
    for k, round_ in enumerate(run.plan.rounds(0, _MAX_ROUNDS)):
        for workers, duration in _parts(run.plan, round_):
            spans += [
                Span(worker=w, iteration=k, kind="exchange", start=clock, end=clock + duration)
                for w in workers
            ]
            clock += duration
        if len(spans) >= limit:
            break
    return spans[:limit]
