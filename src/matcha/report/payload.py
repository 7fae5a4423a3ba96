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
from matcha.report.series import curves, short
from matcha.report.summary import Comparison, compare, reached
from matcha.report.timeline import timeline, worker_loads
from matcha.strategies import STRATEGIES, has_budget
from matcha.topology import Topology

Progress = Callable[[int, int], None]
# The page's fixed colour slots; a second run of a strategy takes one of the spare ones.
SLOTS = tuple(STRATEGIES)
NUM_STYLES = 12


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
    first = [] if winner is None or runs[winner].plan is None else runs[winner].plan.levels
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
    styles = _styles([run.header.strategy for run in runs])
    shown = [
        {
            "label": row.label,
            "style": style,
            "strategy": row.strategy,
            "budget": row.budget,
            "clock": row.clock,
            "unit": row.unit,
            "diverged": row.diverged_at is not None,
            "network": None if run.plan is None else topologies.index(_same(run, topologies)),
            "curves": curves(run.records),
            "hit": _hit(run, comparison),
            "timeline": timeline(run),
            "loads": worker_loads(run),
        }
        for run, row, style in zip(runs, comparison.rows, styles, strict=True)
    ]
    return {
        "title": title or words.title(runs, plans),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "objective": comparison.objective,
        "target": short(comparison.target),
        "target_given": comparison.given,
        "winner": winner,
        "summaries": [_rounded(asdict(row)) for row in comparison.rows],
        "strategies": [
            {"name": name, "has_budget": has_budget(name), "about": STRATEGIES[name].about}
            for name in SLOTS
        ],
        "runs": shown,
        "networks": networks,
    }


def _hit(run: Run, comparison: Comparison) -> dict[str, Any] | None:
    """Where the run reached the target, to mark on its curves."""
    record = reached(run, comparison.objective, comparison.target)
    if record is None or comparison.objective is None:
        return None
    y = getattr(record, comparison.objective)
    return {"epoch": short(record.epoch), "time": short(record.time), "y": short(y)}


def _styles(strategies: Sequence[str]) -> list[int]:
    """A colour slot for each run: its strategy's own where that is still free."""
    free = list(range(NUM_STYLES))
    styles: list[int] = []
    for strategy in strategies:
        wanted = SLOTS.index(strategy) if strategy in SLOTS else -1
        spare = [s for s in free if s >= len(SLOTS)] or free
        slot = wanted if wanted in free else spare[0] if spare else len(styles) % NUM_STYLES
        if slot in free:
            free.remove(slot)
        styles.append(slot)
    return styles


def _distinct(topologies: Any) -> list[Topology]:
    found: list[Topology] = []
    for topology in topologies:
        if not any(_alike(topology, other) for other in found):
            found.append(topology)
    return found


def _alike(a: Topology, b: Topology) -> bool:
    return (a.num_workers, a.links, a.link_times) == (b.num_workers, b.links, b.link_times)


def _same(run: Run, topologies: Sequence[Topology]) -> Topology:
    return next(t for t in topologies if _alike(run.plan.topology, t))


def _share(progress: Progress | None, number: int, count: int) -> Progress | None:
    if progress is None:
        return None
    return lambda done, total: progress(number * total + done, count * total)


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {k: short(v) if isinstance(v, float) else v for k, v in row.items()}
