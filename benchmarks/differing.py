"""Data that differ, on digits: what wires and momentum that follows meetings are worth.

    python benchmarks/differing.py      # prints a table, writes benchmarks/results/differing.json

Eight workers on er8 that see two or three classes each (Dirichlet, 0.1), a small network with
GroupNorm, ten epochs; the average model's test accuracy and loss. What the file holds is not
run again, so it can be stopped and run in pieces. `--runs N` ends after so many.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from parts.outcome import RESULTS, write

from matcha import families, plan
from matcha.simulation import Settings, Simulation
from matcha.zoo.recipes import Choices, recipe

EPOCHS = 10
SEEDS = tuple(range(5))
GREEDY = [
    ("greedy", 0.05, wire, momentum)
    for wire, momentum in product(
        ("float32", "modulo:3"), ("local", "quasi-global", "outer", "tracking")
    )
]
CASES = [("vanilla", 1.0, "float32", "local"), *GREEDY]
"""Strategy, budget, wire and momentum."""


def run(strategy: str, budget: float, wire: str, momentum: str, seed: int) -> dict[str, Any]:
    """One training; tracking sends two vectors and so gets half the budget."""
    how = recipe("digits")
    choices = Choices(
        num_workers=8, model="cnn-gn", partition="dirichlet", concentration=0.1, seed=seed
    )
    spent = budget / 2 if momentum == "tracking" else budget
    made = plan(families.paper("er8"), spent, strategy, seed=seed, wire=wire)
    settings = Settings(
        epochs=EPOCHS,
        schedule=how.schedule(EPOCHS),
        optimizer=how.optimizer,
        momentum=momentum,
        evaluate_every=EPOCHS,
    )
    *_, last = Simulation(how.task(choices), made, settings)
    return {
        "case": [strategy, budget, wire, momentum],
        "seed": seed,
        "test_accuracy": last.test_accuracy,
        "train_loss": last.train_loss,
    }


def table(runs: list[dict[str, Any]]) -> str:
    """A line a case: means over seeds that did not diverge, and the least and the greatest."""
    lines = [
        f"{'strategy':<9}{'bytes':>6}  {'wire':<10}{'momentum':<14}{'accuracy':>9}{'range':>13}"
        f"{'loss':>7}{'seeds':>7}{'diverged':>10}"
    ]
    for case in CASES:
        found = [r for r in runs if r["case"] == list(case)]
        ended = [r for r in found if r["train_loss"] is not None]
        if not ended:
            continue
        scores = [100 * r["test_accuracy"] for r in ended]
        strategy, budget, wire, momentum = case
        ends = f"{min(scores):.1f}–{max(scores):.1f}"
        lines.append(
            f"{strategy:<9}{budget:>6g}  {wire:<10}{momentum:<14}{fmean(scores):>9.1f}{ends:>13}"
            f"{fmean(r['train_loss'] for r in ended):>7.2f}{len(found):>7}"
            f"{len(found) - len(ended):>10}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS / "differing")
    parser.add_argument("--runs", type=int, default=len(CASES) * len(SEEDS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = args.output.with_suffix(".json")
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    done = {(*r["case"], r["seed"]) for r in runs}
    missing = [(*case, seed) for seed in SEEDS for case in CASES if (*case, seed) not in done]
    for case in missing[: args.runs]:
        runs.append(run(*case))
        document = {"benchmark": "differing", "epochs": EPOCHS, "runs": runs}
        write(args.output, document, table(runs))
    print(table(runs))


if __name__ == "__main__":
    main()
