"""What Adam makes of a negative mixing eigenvalue: digits, an MLP, eight workers on paper:er8.

    python benchmarks/adam_weights.py      # about four minutes of one core

The weight that minimizes ρ gives vanilla's W eigenvalues w down to −0.81. Along such an eigenvector
and where the curvature is h, a step of Adam overshoots the mean by more than the workers differed
once ηh/√v > (1 − w)/|w|, and W turns what is left back to where it was: workers lock in opposition
to one another. That makes Adam's second moment v larger and does not quite cancel in the mean of
the gradients, so the average model descends more slowly. `vanilla, w ≥ 0` has the largest weight
without negative eigenvalues: slower consensus, and nothing to lock. Without Adam's first moment the
mean itself overshoots from ηh/√v = 2 on, and vanilla loses nothing to the others.
Writes benchmarks/results/adam_weights.json and .txt.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from harness import Column, Row, finish, parser, table
from torch import Tensor, nn

import matcha
from matcha import Plan, families
from matcha.simulation import SGD, Adam, Delays, Engine, Settings, Simulation
from matcha.strategies import Vanilla
from matcha.training.optimizers import Optimizer
from matcha.zoo.data import digits, partition
from matcha.zoo.images import ImageTask
from matcha.zoo.recipes import recipe

TOPOLOGY = families.paper("er8")
WIDTH, DEPTH, BATCH, EPOCHS = 128, 4, 32, 20
OPTIMIZERS: Mapping[str, tuple[Optimizer, tuple[float, ...]]] = {
    "Adam": (Adam(), (0.001, 0.003, 0.01, 0.03)),
    "Adam β₁=0": (Adam(beta1=0.0), (0.001, 0.003)),
    "SGD": (SGD(), (0.5,)),
}


def plans() -> dict[str, Plan]:
    """The weight that minimizes ρ against others."""
    vanilla = matcha.plan(TOPOLOGY, strategy="vanilla")
    return {
        "allreduce": matcha.plan(TOPOLOGY, strategy="allreduce"),
        "vanilla": vanilla,
        "vanilla, w ≥ 0": matcha.plan(
            TOPOLOGY, strategy=Vanilla(alpha=vanilla.alpha / (1 - least(vanilla)))
        ),
        "greedy 0.5": matcha.plan(TOPOLOGY, 0.5, "greedy"),
        "greedy 0.1": matcha.plan(TOPOLOGY, 0.1, "greedy"),
    }


def least(plan: Plan) -> float:
    """The smallest eigenvalue of W(0)."""
    return round(float(np.linalg.eigvalsh(plan.mixing_matrix(0))[0]), 6)


class Watched(Engine):
    """An engine that keeps an eye on one pattern of the workers' deviations."""

    pattern: Tensor
    """A weight for each worker, of sum 0."""
    before: Tensor | None = None
    cosines: list[float]

    def step(self, index: int) -> None:
        """An iteration, and how much the deviation after it is like the one before."""
        super().step(index)
        now = self.pattern @ self.workers.parameters
        if self.before is not None:
            self.cosines.append(float(nn.functional.cosine_similarity(now, self.before, dim=0)))
        self.before = now


def model() -> nn.Module:
    """Wide layers have the curvature; the small CNN of the task `digits` shows less of it."""
    layers: list[nn.Module] = []
    for _ in range(DEPTH):
        layers += [nn.Linear(WIDTH if layers else 64, WIDTH), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def trained(plan: Plan, optimizer: Optimizer, rate: float, seed: int) -> dict[str, Any]:
    """The average model's final loss; Adam's denominator and the locking at the first decay."""
    images, m = digits(), TOPOLOGY.num_workers
    parts = partition(images.train_labels, m, "iid", seed=seed)
    task = ImageTask("digits", images, parts, model, batch_size=BATCH, seed=seed, flat=True)
    engine = Watched(task, optimizer)
    engine.cosines = []
    mixing = matcha.plan(TOPOLOGY, strategy="vanilla").mixing_matrix(0)
    engine.pattern = torch.from_numpy(np.linalg.eigh(mixing)[1][:, 0]).float()
    settings = Settings(
        epochs=EPOCHS,
        schedule=recipe("digits").schedule(EPOCHS, rate),
        optimizer=optimizer,
        evaluate_every=EPOCHS,
        delays=Delays(compute_time=1.0),
    )
    found: dict[str, Any] = {"loss": None, "denominator": None, "cosine": None}
    for record in Simulation(task, plan, settings, engine=engine):
        if record.epoch == EPOCHS // 2:
            second = engine.memory.get("second")
            found["denominator"] = None if second is None else float(second.sqrt().mean())
            found["cosine"] = statistics.fmean(engine.cosines[-2 * task.steps_per_epoch :])
        found["loss"] = record.train_loss  # none where it is no longer finite
    return found


def measured(seeds: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each optimizer, rate and plan."""
    rows = []
    for name, (optimizer, rates) in OPTIMIZERS.items():
        for rate in rates:
            for label, plan in plans().items():
                runs = [trained(plan, optimizer, rate, seed) for seed in seeds]
                row: dict[str, Any] = {"optimizer": name, "rate": rate, "run": label}
                row["eigenvalue"] = least(plan) if plan.strategy == "vanilla" else None
                for key in runs[0]:
                    values = [run[key] for run in runs]
                    row[key] = None if None in values else statistics.fmean(values)
                rows.append(row)
                print(row, flush=True)
    return rows


def describe(document: Mapping[str, Any]) -> str:
    """A line per optimizer and rate, a column per plan."""
    rows = document["rows"]
    labels = list(dict.fromkeys(row["run"] for row in rows))

    def cell(label: str) -> Callable[[Row], str]:
        def text(some: Row) -> str:
            loss, own = some[label]["loss"], some[label]["denominator"]
            if loss is None:
                return "–"
            ratio = f" ({own / some['allreduce']['denominator']:.2f})" if own else ""
            return f"{loss:.3f}{ratio}"

        return text

    columns = [
        Column("optimizer", "optimizer"),
        Column("rate", "rate", "g"),
        *(Column(label, cell(label), ">s") for label in labels),
        Column("locked", lambda some: some["vanilla"]["cosine"], ".2f"),
    ]
    found: dict[tuple[str, float], dict[str, Any]] = {}
    for row in rows:
        key = {"optimizer": row["optimizer"], "rate": row["rate"]}
        found.setdefault(tuple(key.values()), key)[row["run"]] = row
    lines = [
        f"Training loss of the average model after {EPOCHS} epochs, {document['seeds']} seeds; in",
        "brackets Adam's denominator (mean of √v at half of the epochs) over that of all-reduce.",
        "Locked: cosine of vanilla's deviation, along the eigenvector of its least w, with that of",
        "the iteration before; mixing alone makes it -1. –: no longer finite.",
        "",
    ]
    return "\n".join([*lines, table(columns, found.values())])


def main() -> None:
    options = parser(__doc__, output="adam_weights")
    options.add_argument("--seeds", type=int, default=3)
    args = options.parse_args()
    document = {"graph": "paper:er8", "epochs": EPOCHS, "seeds": args.seeds}
    document["rows"] = measured(range(args.seeds))
    finish(args.output, document, describe(document))


if __name__ == "__main__":
    main()
