"""What sharing Adam's first moments is worth, and in how many bits: a tiny language model on a CPU.

    python benchmarks/moments.py      # about five minutes of one core

Eight workers train a transformer of 0.23M parameters on this project's own documentation, with
AdamW: all-reduce, and one dimension of a hypercube after another, every or every fourth iteration.
Loss of the average model on held-out pages, by learning rate; bytes as a share of a float32 ring
all-reduce in every iteration. One seed. Writes benchmarks/results/moments.json and .txt.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from harness import Column, Row, finish, parser, table

import matcha
from matcha.plans import Plan
from matcha.simulation import Engine, Execution, Settings, Simulation
from matcha.topology import families
from matcha.training.optimizers import adamw
from matcha.training.rates import Cosine
from matcha.wires import parse_wire
from matcha.zoo.corpus import read_corpus
from matcha.zoo.models import Transformer
from matcha.zoo.text import TextTask

DOCS = Path(__file__).parents[1] / "docs"
M, VOCABULARY, LENGTH, BATCH, ITERATIONS = 8, 2048, 64, 4, 200
RATES = (3e-3, 8e-3)
METHODS: Mapping[str, tuple[int | None, str, str]] = {
    "all-reduce": (None, "float32", "local"),
    "every iteration, float32": (1, "float32", "local"),
    "every iteration, float32, shared": (1, "float32", "shared"),
    "every iteration, modulo:4, shared": (1, "modulo:4", "shared"),
    "every iteration, modulo:3, shared": (1, "modulo:3", "shared"),
    "every iteration, modulo:3": (1, "modulo:3", "local"),
    "every fourth, modulo:3, shared": (4, "modulo:3", "shared"),
    "every fourth, modulo:3": (4, "modulo:3", "local"),
}
"""Iterations from one round to the next, the wire, and the momentum."""


def plan_of(period: int | None, wire: str) -> Plan:
    """All-reduce, or one dimension of the hypercube after another."""
    if period is None:
        return matcha.plan(families.hypercube(3), strategy="allreduce")
    budget = parse_wire(wire).size_ratio() / (3 * period)
    return matcha.plan(families.hypercube(3), budget, "hypercube", wire=wire)


def measure(pages: Path = DOCS, iterations: int = ITERATIONS) -> dict[str, Any]:
    """Every method at every rate."""
    optimizer, execution = adamw(beta2=0.95, weight_decay=0.1, clip_norm=1.0), Execution()
    with TemporaryDirectory() as folder:  # tokens are kept beside what was read
        shutil.copytree(pages, folder, dirs_exist_ok=True)
        corpus = read_corpus(folder, vocabulary=VOCABULARY)
    task = TextTask(
        "docs",
        corpus,
        M,
        lambda: Transformer(VOCABULARY, 64, 2, 2, LENGTH, dropout=0.0, batch_first=True),
        batch_size=BATCH,
        length=LENGTH,
        steps_per_epoch=iterations,
        num_valid=4096,
    )
    engine = Engine(task, optimizer, execution=execution)
    whole = 8 * (M - 1) / M * engine.workers.num_parameters * iterations / 1e6
    rows = []
    for name, (period, wire, momentum) in METHODS.items():
        losses: list[float | None] = []
        for rate in RATES:
            settings = Settings(
                epochs=1,
                schedule=Cosine(base=rate, epochs=1.0, warmup=0.05),
                optimizer=optimizer,
                momentum=momentum,
                execution=execution,
            )
            plan = plan_of(period, wire)
            began = time.perf_counter()
            (record,) = Simulation(task, plan, settings, engine=engine, compute_time=0.0)
            losses.append(record.test_loss)
            print(name, rate, record.test_loss, f"{time.perf_counter() - began:.0f} s", flush=True)
        share = (record.megabytes_sent or 0.0) / whole
        rows.append({"method": name, "share": share, "losses": losses})
    return {"rates": RATES, "rows": rows, "parameters": engine.workers.num_parameters}


def describe(document: Mapping[str, Any]) -> str:
    """A line per method, a column per rate."""

    def loss(place: int) -> Any:
        return lambda row: row["losses"][place]

    def bytes_of(row: Row) -> str:
        return f"1/{1 / row['share']:.1f}"

    columns = [Column("exchange", "method"), Column("bytes", bytes_of)]
    columns += [Column(f"rate {r:g}", loss(k), ".3f") for k, r in enumerate(document["rates"])]
    return table(columns, document["rows"])


def main() -> None:
    """Measure, print and write."""
    asked = parser(__doc__, output="moments").parse_args()
    document = json.loads(json.dumps(measure()))
    finish(asked.output, document, describe(document))


if __name__ == "__main__":
    main()
