"""Presence: which workers were there when, where they come and go."""

from __future__ import annotations

from typing import Any

from matcha.records import Run

__all__ = ["presence"]


def presence(run: Run) -> dict[str, Any] | None:
    """The stretches of iterations that workers were away for, as columns for the page.

    None where nobody came or went. An end that is None is the end of the run.
    """
    changes = sorted(tuple(c) for record in run.records for c in record.changes or ())
    if not changes:
        return None
    gone: dict[int, int] = {}
    away: list[tuple[int, int, int | None]] = []
    for iteration, worker, is_there in changes:
        if is_there:
            # Two may have written it down, each as it learnt it: the first word counts.
            if worker in gone:
                away.append((worker, gone.pop(worker), iteration))
        else:
            gone.setdefault(worker, iteration)
    away += [(worker, since, None) for worker, since in gone.items()]
    away.sort(key=lambda stretch: stretch[:2])
    return {
        "iterations": max(record.iteration for record in run.records),
        "worker": [worker for worker, _, _ in away],
        "start": [since for _, since, _ in away],
        "stop": [until for _, _, until in away],
    }
