"""Words: what the figures say, in sentences. Headlines, captions, text alternatives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matcha.plans import PlanLike
from matcha.records import Record, Run, RunHeader, has_diverged

RHO_NOTE = (
    "Compare strategies by the consensus error. ρ is ‖E[WᵀW] − J‖ of one iteration where rounds "
    "are drawn at random, and a mean over the whole cycle where they repeat: not the same measure."
)
NAMES = {
    "train_loss": "training loss",
    "worker_loss": "workers' own loss",
    "test_loss": "test loss",
    "test_accuracy": "test accuracy",
    "consensus_distance": "consensus distance",
    "gradient_norm": "average squared gradient norm",
    "epoch": "epochs",
    "time": "seconds",
    "iteration": "iterations",
    "comm_units": "communication",
    "megabytes_sent": "megabytes sent by a worker",
}
"""What the fields of a record are called."""


def title(runs: Sequence[Run], plans: Sequence[PlanLike] = ()) -> str:
    """A heading: the task and where it ran, or what is planned."""
    tasks = dict.fromkeys(run.header.task for run in runs) or ["Plans"]
    every = [*(run.plan for run in runs if run.plan is not None), *plans]
    names = dict.fromkeys(plan.topology.name for plan in every)
    where = f" on {', '.join(names)}" if names else ""
    return f"{', '.join(tasks)}{where}"


def seconds(value: float | None) -> str:
    """A duration for people.

    >>> seconds(0.0423), seconds(12.34), seconds(3725)
    ('42.3 ms', '12.3 s', '1 h 2 min')
    """
    if value is None:
        return "–"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    if value < 120:
        return f"{value:.3g} s"
    minutes = round(value / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def number(value: float) -> str:
    """A number for people.

    >>> number(0.123456), number(31710.4), number(math.nan)
    ('0.1235', '31,710', '–')
    """
    if math.isnan(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def percent(value: float | None) -> str:
    """A fraction as a percentage."""
    return "–" if value is None else f"{100 * value:.1f} %"


def curve_text(payload: Mapping[str, Any], metric: str, axis: str) -> str:
    """A text alternative for a chart of curves."""
    unit = NAMES[axis].removesuffix(" sent by a worker")
    parts = []
    for run in payload["runs"]:
        curve = run["curves"].get(metric)
        if curve:
            y, x = curve["y"], curve[axis]
            over = f" over {x[-1]:.3g} {unit}" if x[-1] is not None else ""
            parts.append(f"{run['label']} from {y[0]:.3g} to {y[-1]:.3g}{over}")
    what = metric.replace("_", " ")
    return f"{what.capitalize()} against {unit}: {'; '.join(parts)}."


def loads_text(payload: Mapping[str, Any]) -> str:
    """A text alternative for the workers' communication."""
    parts = []
    for run in payload["runs"]:
        load = run["loads"].get("planned") or run["loads"].get("measured")
        if load:
            parts.append(f"{run['label']} {min(load):.3g} to {max(load):.3g}")
    return f"Communication per iteration, least to most busy worker: {'; '.join(parts)}."


def loss_in_words(record: Record) -> str:
    """The loss that decides, where it was just evaluated, or else the workers' own."""
    if record.train_loss is not None:
        return f"loss {record.train_loss:.4f}"
    if record.worker_loss is None or has_diverged(record.worker_loss):
        return "diverged"
    return f"own loss {record.worker_loss:.4f}"


def record_line(record: Record, epochs: int | None = None) -> str:
    """A line about a record, for a terminal."""
    parts = [f"epoch {record.epoch:g}" + (f"/{epochs}" if epochs else ""), loss_in_words(record)]
    if record.test_accuracy is not None:
        parts.append(f"test accuracy {record.test_accuracy:.1%}")
    if record.consensus_distance is not None:
        parts.append(f"consensus distance {record.consensus_distance:.2e}")
    return "  ".join([*parts, f"{record.time:.1f} s"])


def link_speed(header: RunHeader) -> str | None:
    """How fast the links of a run were made."""
    mbps = header.setting("link_mbps")
    return None if mbps is None else f"{str(mbps).removesuffix(' (emulated)')} Mbit/s"


def join_names(names: Sequence[str]) -> str:
    """Names in a sentence.

    >>> join_names(["a", "b", "c"])
    'a, b and c'
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
