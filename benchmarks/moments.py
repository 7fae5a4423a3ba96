"""What sharing first moments is worth, how often and in how many bits: a tiny language model.

    python benchmarks/moments.py      # about ten minutes of one core

Eight workers train a transformer of 0.23M parameters on this project's own documentation, with
AdamW or Muon: all-reduce, and one dimension of a hypercube after another, at every iteration or
more rarely, with first moments in all, some or none of the meetings. Loss of the average model on
held-out pages, by learning rate; bytes as a share of a float32 ring all-reduce in every iteration.
One seed. Writes benchmarks/results/moments.json and .txt.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from harness import Column, Row, finish, parser, table

import matcha
from matcha.plans import Plan
from matcha.simulation import Engine, Execution, Settings, Simulation
from matcha.simulation.mixing import WireMixing
from matcha.topology import families
from matcha.training.optimizers import Muon, adamw
from matcha.training.rates import Cosine
from matcha.wires import parse_wire
from matcha.zoo.corpus import read_corpus
from matcha.zoo.language import TextTask
from matcha.zoo.models import Transformer

DOCS = Path(__file__).parents[1] / "docs"
M, VOCABULARY, LENGTH, BATCH, ITERATIONS = 8, 2048, 64, 4, 200
RATES = (8e-3, 16e-3)


@dataclass(frozen=True)
class Method:
    """Who meets when, over which wire, and which meetings carry the first moment."""

    period: int | None
    """Iterations from one round to the next; None: all-reduce."""
    wire: str = "modulo:3"
    moments: int = 0
    """First moments travel in every so many meetings; 0: in none."""
    optimizer: str = "AdamW"


METHODS: Mapping[str, Method] = {
    "all-reduce": Method(None, "float32"),
    "every iteration, modulo:3": Method(1),
    "every second, modulo:3, shared": Method(2, moments=1),
    "every fourth, modulo:3": Method(4),
    "every eighth, modulo:3, shared": Method(8, moments=1),
    "every third, modulo:2": Method(3, "modulo:2"),
    "every iteration, modulo:3, shared": Method(1, moments=1),
    "every iteration, modulo:3, every fourth shared": Method(1, moments=4),
    "every iteration, float32": Method(1, "float32"),
    "every iteration, float32, shared": Method(1, "float32", moments=1),
    "Muon: all-reduce": Method(None, "float32", optimizer="Muon"),
    "Muon: every fourth, modulo:3": Method(4, optimizer="Muon"),
}
OPTIMIZERS = {
    "AdamW": adamw(beta2=0.95, weight_decay=0.1, clip_norm=1.0),
    "Muon": Muon(beta2=0.95, weight_decay=0.1, clip_norm=1.0),
}


class SomeMoments(Engine):
    """An engine whose first moments travel in every so many meetings only."""

    every = 1

    def step(self, index: int) -> None:
        """An iteration; in most of its rounds parameters meet alone."""
        mixing, number = self.mixing, sum(map(bool, self._rounds[:index]))
        whole = mixing.rows
        if not isinstance(mixing, WireMixing) or number % self.every == 0:
            super().step(index)
            return
        meetings = mixing.meetings
        mixing.rows, mixing.meetings = whole[:1], meetings[:1]
        super().step(index)
        mixing.rows, mixing.meetings = whole, meetings


def plan_of(period: int | None, wire: str) -> Plan:
    """All-reduce, or one dimension of the hypercube after another."""
    if period is None:
        return matcha.plan(families.hypercube(3), strategy="allreduce")
    budget = parse_wire(wire).size_ratio() / (3 * period)
    return matcha.plan(families.hypercube(3), budget, "hypercube", wire=wire)


def measure(pages: Path = DOCS, iterations: int = ITERATIONS) -> dict[str, Any]:
    """Every method at every rate."""
    execution = Execution()
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
    engines = {k: SomeMoments(task, o, execution=execution) for k, o in OPTIMIZERS.items()}
    parameters = engines["AdamW"].workers.num_parameters
    whole = 8 * (M - 1) / M * parameters * iterations / 1e6
    rows = []
    for name, method in METHODS.items():
        losses: list[float | None] = []
        engine, optimizer = engines[method.optimizer], OPTIMIZERS[method.optimizer]
        engine.every = method.moments or 1
        for rate in RATES:
            settings = Settings(
                epochs=1,
                schedule=Cosine(base=rate, epochs=1.0, warmup=0.05),
                optimizer=optimizer,
                momentum="shared" if method.moments else "local",
                execution=execution,
            )
            plan = plan_of(method.period, method.wire)
            began = time.perf_counter()
            (record,) = Simulation(task, plan, settings, engine=engine, compute_time=0.0)
            losses.append(record.test_loss)
            print(name, rate, record.test_loss, f"{time.perf_counter() - began:.0f} s", flush=True)
        travels = (1 + 1 / method.moments) / 2 if method.moments else 1.0
        share = (record.megabytes_sent or 0.0) * travels / whole
        rows.append({"method": name, "share": share, "losses": losses})
    rows.sort(key=lambda row: (row["method"].startswith("Muon"), -row["share"]))
    return {"rates": RATES, "rows": rows, "parameters": parameters}


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
