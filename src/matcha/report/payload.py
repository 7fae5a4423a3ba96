"""The payload: everything the page shows, as one JSON document embedded in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

from matcha.plans import PlanLike
from matcha.records import Run
from matcha.report import words
from matcha.report.explorer import network
from matcha.report.groups import Group
from matcha.report.presence import presence
from matcha.report.rows import Summary
from matcha.report.series import mean_curves, short
from matcha.report.styles import STYLES, styles_of
from matcha.report.summary import Comparison, compare
from matcha.report.timeline import timeline, worker_loads
from matcha.strategies import STRATEGIES
from matcha.topology import Topology

Progress = Callable[[int, int], None]


def build_payload(
    runs: Sequence[Run],
    plans: Sequence[PlanLike] = (),
    *,
    title: str | None = None,
    target: float | None = None,
    sweep_seconds: float = 20.0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Everything the page shows.

    Args:
        runs: The runs, in the order to show them.
        plans: Plans to explore that were not run; of a staged one, each level.
        title: The page's heading; by default made from the task and topology.
        target: The loss at which runs are compared, as for `compare`.
        sweep_seconds: The longest to spend on planning the slider's stops, all topologies together.
        progress: Called with (steps done, steps in all) while the sweeps are planned.
    """
    comparison = compare(runs, target)
    given = [*(run.plan for run in runs if run.plan is not None), *plans]
    every = [level for plan in given for level in plan.levels]
    topologies = _distinct(plan.topology for plan in every)
    networks = []
    winner = comparison.winner
    opened = None if winner is None else comparison.groups[winner].plan
    first = [] if opened is None else opened.levels
    for number, topology in enumerate(topologies):
        networks.append(
            network(
                topology,
                [plan for plan in every if _alike(plan.topology, topology)],
                start=next((plan for plan in first if _alike(plan.topology, topology)), None),
                seconds=sweep_seconds / len(topologies),
                progress=_share(progress, number, len(topologies)),
            )
        )
    styles = styles_of([row.strategy for row in comparison.rows])
    shown = [
        {
            "label": row.label,
            "style": style,
            "strategy": row.strategy,
            "budget": row.budget,
            "clock": row.clock,
            "unit": row.unit,
            "seeds": row.seeds,
            "diverged": row.diverged_at is not None,
            "network": None if group.plan is None else _place(group, topologies),
            "curves": mean_curves(group.runs),
            "hit": _hit(row, comparison),
            "timeline": timeline(group.runs[0]),
            "presence": presence(group.runs[0]),
            "workers": group.runs[0].header.num_workers,
            "loads": worker_loads(group.runs[0]),
        }
        for group, row, style in zip(comparison.groups, comparison.rows, styles, strict=True)
    ]
    return {
        "title": title or words.title(runs, plans),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "objective": comparison.objective,
        "target": short(comparison.target),
        "target_given": comparison.given,
        "winner": winner,
        "verdict": comparison.verdict.sentence,
        "summaries": [_rounded(asdict(row)) for row in comparison.rows],
        "strategies": list(STRATEGIES),
        "styles": [asdict(style) for style in STYLES],
        "runs": shown,
        "networks": networks,
    }


def _hit(row: Summary, comparison: Comparison) -> dict[str, Any] | None:
    """Where the target was reached, to mark on the curves."""
    if row.time_to_target is None:
        return None
    return {
        "epoch": short(row.epochs_to_target),
        "time": short(row.time_to_target),
        "y": short(comparison.target),
    }


def _distinct(topologies: Any) -> list[Topology]:
    found: list[Topology] = []
    for topology in topologies:
        if not any(_alike(topology, other) for other in found):
            found.append(topology)
    return found


def _alike(a: Topology, b: Topology) -> bool:
    return (a.num_workers, a.links, a.link_times) == (b.num_workers, b.links, b.link_times)


def _place(group: Group, topologies: Sequence[Topology]) -> int:
    return next(i for i, t in enumerate(topologies) if _alike(group.plan.topology, t))


def _share(progress: Progress | None, number: int, count: int) -> Progress | None:
    if progress is None:
        return None
    return lambda done, total: progress(number * total + done, count * total)


def _rounded(value: Any) -> Any:
    """Numbers as a page needs them, at any depth."""
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return short(value) if isinstance(value, float) else value
