"""Groups: runs of one choice over its seeds, their labels, and whether runs can be compared."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from matcha.records import Run
from matcha.report import words
from matcha.strategies import with_budget

_SAME_CLOCK = 1.01  # times that runs of one command share differ by less


def difference(runs: Sequence[Run]) -> str | None:
    """Why times of these runs do not compare, for a sentence; None where they do."""
    for noun, (of, advice) in _CONDITIONS.items():
        found = dict.fromkeys(str(value) for run in runs if (value := of(run)))
        if len(found) > 1:
            return f"the runs differ in their {noun} ({words.join_names(list(found))}): {advice}"
    paces = [pace for run in runs if (pace := _measured(run)) is not None]
    if len({_work(run) for run in runs}) == 1 and paces and max(paces) > _SAME_CLOCK * min(paces):
        return (
            f"computing was measured apart, {words.seconds(min(paces))} to "
            f"{words.seconds(max(paces))} per iteration: simulate the runs with one command, or "
            "give each the same --compute-time"
        )
    return None


def clock_in_words(runs: Sequence[Run]) -> str | None:
    """What a simulated clock counts, where all runs' count alike; None for other clocks."""
    if not runs or {run.header.clock for run in runs} != {"simulated"} or difference(runs):
        return None
    pace, links = _measured(runs[0]), _links(runs[0])
    delays = _delays(runs[0])
    given, speeds = delays.get("compute_seconds"), delays.get("speeds")
    parts = []
    if given is not None:
        parts.append(f"{words.seconds(given)} of computing per iteration")
    elif pace is not None:
        parts.append(f"{words.seconds(pace)} of computing per iteration, as measured")
    if speeds:
        measured = "" if parts else "computing as measured, "
        parts.append(f"{measured}workers at speeds {', '.join(map(str, speeds))}")
    if links is not None:
        parts.append(f"{links} per matching")
    return "; ".join(parts) or None


def _data(run: Run) -> str | None:
    """Whose share of the data is whose, and of how much."""
    partition, number = run.header.setting("partition"), run.header.setting("num_train")
    if str(partition).startswith("dirichlet"):
        partition = f"{partition} {run.header.setting('concentration')}"
    return f"{partition} of {number}" if number else partition


def _links(run: Run) -> str | None:
    """How long an exchange takes, where the run's plan or its network do not say it."""
    if run.header.clock == "wall":
        return words.link_speed(run.header) or "as they are"
    counts = run.plan is not None and run.plan.timing.unit == "units"
    unit = _delays(run).get("seconds_per_unit")
    return words.seconds(unit) if counts and unit else None


def _computing(run: Run) -> str | None:
    delays = _delays(run)
    if not delays:
        return None
    given, speeds = delays.get("compute_seconds"), delays.get("speeds")
    pace = "as measured" if given is None else f"{words.seconds(given)} per iteration"
    return f"{pace}, at speeds {', '.join(map(str, speeds))}" if speeds else pace


def _delays(run: Run) -> dict[str, Any]:
    """What a simulated clock is made of; a real one needs no answer."""
    found = run.header.setting("delays") if run.header.clock == "simulated" else None
    return found if isinstance(found, dict) else {}


def _measured(run: Run) -> float | None:
    """Seconds of computing per iteration on a simulated clock whose pace was measured."""
    delays = _delays(run)
    if not run.records or not delays or delays.get("compute_seconds") is not None:
        return None
    if delays.get("speeds") or run.header.setting("asynchronous"):
        return None
    spent = [record.compute_seconds for record in run.records]
    known = [seconds for seconds in spent if seconds is not None]
    iterations = run.records[-1].iteration
    return sum(known) / iterations if len(known) == len(spent) and iterations else None


def link_time_beside_measured(runs: Sequence[Run]) -> float | None:
    """Seconds of a matching, where all runs count in it and computing was measured."""
    found = {_delays(run).get("seconds_per_unit") for run in runs}
    counts = all(run.plan is not None and run.plan.timing.unit == "units" for run in runs)
    measured = counts and all(_measured(run) is not None for run in runs)
    return next(iter(found)) if measured and len(found) == 1 else None


def _work(run: Run) -> Hashable:
    """What computing a gradient depends on: other work rightly takes other times."""
    header = run.header
    return header.setting("batch_size"), str(header.setting("execution")), header.num_workers


_APART = "report on each by itself"
_CONDITIONS: dict[str, tuple[Callable[[Run], Any], str]] = {
    "tasks": (lambda run: run.header.task, _APART),
    "models": (lambda run: run.header.setting("model"), _APART),
    "data": (_data, _APART),
    "clocks": (lambda run: run.header.clock, _APART),
    "links": (_links, "give each the same speed of links"),
    "computing": (_computing, "give each the same --compute-time and --speeds"),
}
"""In what runs may differ so that their times do not compare, and what to do then."""


# -- runs of one choice ----------------------------------------------------------------------------


def group_runs(runs: Sequence[Run]) -> list[tuple[Run, ...]]:
    """Runs by what was chosen, in the order in which they first appear.

    Runs of the same seed stay apart: they are repetitions, not a sample.
    """
    found: dict[str, tuple[Run, ...]] = {}
    for run in runs:
        key = _choice(run)
        while any(run.header.seed == other.header.seed for other in found.get(key, ())):
            key += "+"
        found[key] = (*found.get(key, ()), run)
    return list(found.values())


def label_runs(runs: Sequence[Run]) -> list[str]:
    """A short, distinct name for each run: its strategy, and only what sets it apart."""
    headers = [run.header for run in runs]
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
        pairs = list(zip(labels, extras, strict=True))
        ways = Counter(label for label, _ in set(pairs))
        labels = [f"{label}, {extra}" if ways[label] > 1 else label for label, extra in pairs]
    counts = [labels[: place + 1].count(label) for place, label in enumerate(labels)]
    return [
        label if count == 1 else f"{label} ({count})"
        for label, count in zip(labels, counts, strict=True)
    ]


def _over(name: str, wire: str) -> str:
    return name if wire == "float32" else f"{name}, {wire}"


def _choice(run: Run) -> str:
    """All that was chosen but the seed, wherever it is written, as text."""
    header = run.header
    same = ("kind", "task", "strategy", "budget", "wire", "momentum", "num_workers")
    parts = (
        *(getattr(header, name) for name in same),
        re.sub(r"[-, ]+s(eed )?\d+$", "", header.name),
        None if run.plan is None else run.plan.topology.links,
        _without_seeds(header.config),
    )
    return json.dumps(parts, sort_keys=True, default=str)


def _without_seeds(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_seeds(v) for k, v in value.items() if k not in ("seed", "command")}
    return value
