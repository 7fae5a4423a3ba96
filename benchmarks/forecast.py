"""How right the simulator's forecast of the consensus distance is: forecast over measured.

    python benchmarks/forecast.py      # about two minutes of one core

Digits on paper:er8, with and without momentum, data alike and in shards, seven plans; a learning
rate that warms up and decays; and the trainings of wires_gpu.py on CIFAR and Penn Treebank, as far
as whole messages and local momentum go. The least, the median and the largest ratio over the epochs
after the first. Writes benchmarks/results/forecast.json and .txt.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from typing import Any

from harness import COMMITTED, Column, finish, parser, table

import matcha
from matcha import families
from matcha.simulation import SGD, Settings, Simulation
from matcha.zoo.recipes import Choices, recipe

PLANS = (
    ("vanilla", 1.0), ("matcha", 0.5), ("matcha", 0.1), ("greedy", 0.5), ("greedy", 0.1),
    ("greedy", 0.02), ("periodic", 0.1),
)  # fmt: skip
EPOCHS = 8


def ratios(task: str, partition: str, momentum: float, strategy: str, budget: float) -> list[float]:
    """Forecast over measured distance, an epoch each after the first."""
    chosen = recipe(task)
    plan = matcha.plan(families.paper("er8"), budget, strategy)
    settings = Settings(
        epochs=EPOCHS,
        schedule=chosen.schedule(EPOCHS),
        optimizer=SGD(momentum=momentum, nesterov=momentum > 0, weight_decay=1e-4),
        evaluate_every=EPOCHS,
    )
    choices = Choices(num_workers=8, partition=partition)  # type: ignore[arg-type]
    return [
        record.predicted_consensus / record.consensus_distance
        for record in Simulation(chosen.task(choices), plan, settings, compute_time=0.0)
        if record.epoch > 1 and record.predicted_consensus and record.consensus_distance
    ]


def recorded() -> Iterator[dict[str, Any]]:
    """The cases that a GPU trained, from its results."""
    for training in json.loads((COMMITTED / "wires_h200.json").read_text())["runs"]:
        run, records = training["run"], training["records"]
        found = [
            record["predicted_consensus"] / record["consensus_distance"]
            for record in records
            if record["epoch"] > 1 and record.get("predicted_consensus")
        ]
        if found:
            row = {"task": run["task"], "momentum": 0.0 if run["task"] == "ptb" else 0.9}
            plan = {"strategy": run["strategy"], "budget": run["bytes"]}
            yield row | {"partition": run["partition"]} | plan | spread(found)


def spread(found: list[float]) -> dict[str, float]:
    """The least, the median and the largest."""
    return {"least": min(found), "median": statistics.median(found), "largest": max(found)}


def measured() -> list[dict[str, Any]]:
    """All cases; those of no momentum and of momentum apart."""
    rows = []
    for task in ("logistic", "digits"):
        for momentum in (0.0, 0.9):
            for partition in ("iid", "shards"):
                for strategy, budget in PLANS:
                    found = ratios(task, partition, momentum, strategy, budget)
                    row = {"task": task, "momentum": momentum, "partition": partition}
                    plan = {"strategy": strategy, "budget": budget}
                    rows.append(row | plan | spread(found))
    return [*rows, *recorded()]


COLUMNS = [
    Column("task", "task"),
    Column("momentum", "momentum", ".1f"),
    Column("data", "partition"),
    Column("strategy", "strategy"),
    Column("C_b", "budget", ".2f"),
    *(Column(name, name, ".2f") for name in ("least", "median", "largest")),
]


def summary(rows: list[dict[str, Any]], momentum: float) -> str:
    """The spread of a kind of training."""
    some = [row for row in rows if row["momentum"] == momentum]
    within = statistics.mean(1 / 3 <= row["median"] <= 3 for row in some)
    return (
        f"momentum {momentum:g}: from {min(r['least'] for r in some):.2f} to "
        f"{max(r['largest'] for r in some):.2f}; a run's median is within a factor of three in "
        f"{100 * within:.0f} % of {len(some)} runs"
    )


def describe(rows: list[dict[str, Any]]) -> str:
    """A line per training and the spread of both kinds."""
    title = "The forecast of the consensus distance over what was measured, after the first epoch."
    return "\n".join([title, table(COLUMNS, rows), *(summary(rows, b) for b in (0.0, 0.9))])


def main() -> None:
    output = parser(__doc__, output="forecast").parse_args().output
    rows = measured()
    finish(output, rows, describe(rows))


if __name__ == "__main__":
    main()
