"""Groups: runs that differ only in their seed, shown as one with its spread."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matcha.records import Run, RunHeader
from matcha.strategies import with_budget

_SEED = re.compile(r"[-, ]+s(eed )?\d+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One choice of strategy, budget and settings, and its runs by seed."""

    runs: tuple[Run, ...]

    @property
    def header(self) -> RunHeader:
        """Of the first run, which speaks for all but their seeds."""
        return self.runs[0].header

    @property
    def plan(self) -> Any:
        """The first run's plan."""
        return self.runs[0].plan


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Runs by what was chosen, in the order in which they first appear.

    Runs of the same seed stay apart: they are repetitions, not a sample.
    """
    found: dict[str, list[Run]] = {}
    for run in runs:
        key = _choice(run)
        while any(run.header.seed == other.header.seed for other in found.get(key, [])):
            key += "+"
        found.setdefault(key, []).append(run)
    return [Group(runs=tuple(members)) for members in found.values()]


def label_groups(groups: Sequence[Group]) -> list[str]:
    """A short, distinct name for each group: its strategy, and only what sets it apart."""
    headers = [group.header for group in groups]
    labels = [_over(header.strategy, header.wire) for header in headers]
    if len(set(labels)) < len(labels):
        labels = [_over(with_budget(h.strategy, h.budget), h.wire) for h in headers]
    if len(set(labels)) < len(labels):
        # A name that only adds to the label says best what is different.
        labels = [
            header.name if header.name.startswith(f"{label}, ") else label
            for header, label in zip(headers, labels, strict=True)
        ]
    momenta = [header.momentum or "local" for header in headers]
    for extras in (momenta, [f"seed {h.seed}" for h in headers], [h.name for h in headers]):
        labels = _told_apart(labels, extras)
    counts: Counter[str] = Counter()
    for i, label in enumerate(labels):
        counts[label] += 1
        labels[i] = label if counts[label] == 1 else f"{label} ({counts[label]})"
    return labels


def label_runs(runs: Sequence[Run]) -> list[str]:
    """A short, distinct name for each run, however many differ only in their seed."""
    return label_groups([Group(runs=(run,)) for run in runs])


def _over(name: str, wire: str) -> str:
    return name if wire == "float32" else f"{name}, {wire}"


def _told_apart(labels: Sequence[str], extras: Sequence[str]) -> list[str]:
    ways: dict[str, set[str]] = {}
    for label, extra in zip(labels, extras, strict=True):
        ways.setdefault(label, set()).add(extra)
    return [
        f"{label}, {extra}" if len(ways[label]) > 1 else label
        for label, extra in zip(labels, extras, strict=True)
    ]


def _choice(run: Run) -> str:
    header = run.header
    place = None if run.plan is None else run.plan.topology.links
    parts = (
        header.kind,
        header.task,
        header.strategy,
        header.budget,
        header.wire,
        header.momentum,
        header.num_workers,
        _SEED.sub("", header.name),
        place,
        _without_seeds(header.config),
    )
    return json.dumps(parts, sort_keys=True, default=str)


def _without_seeds(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_seeds(v) for k, v in value.items() if k not in ("seed", "command")}
    return value
