"""Heterogeneous data on digits: what wires and momentum that follows meetings are worth.

    python benchmarks/differing.py      # prints a table, writes benchmarks/results/differing.json

Eight workers on er8 that see two or three classes each (Dirichlet, 0.1), a small network with
GroupNorm, ten epochs; the average model's test accuracy and loss. What the file holds is not
run again, so it can be stopped and run in pieces. `--runs N` ends after so many.
"""

from __future__ import annotations

from itertools import product
from statistics import fmean, stdev
from typing import Any

import torch
from harness import Column, earlier, parser, table, write

from matcha import families, plan
from matcha.simulation import Simulation
from matcha.training.momentum import parse_momentum
from matcha.zoo.recipes import Choices, recipe

EPOCHS = 10
SEEDS = tuple(range(5))
GREEDY = [
    ("greedy", 0.05, wire, momentum)
    for wire, momentum in product(
        ("float32", "modulo:3"),
        (
            *("local", "quasi-global", "outer", "tracking", "momentum-tracking"),
            *("exact-diffusion", "auto"),
        ),
    )
]
CASES = [
    ("vanilla", 1.0, "float32", "local"),
    ("relaysum", 1.0, "float32", "local"),
    ("relaysum", 0.05, "float32", "local"),
    *GREEDY,
]
"""Strategy, budget, wire and momentum."""


def run(strategy: str, budget: float, wire: str, momentum: str, seed: int) -> dict[str, Any]:
    """One training; who sends two vectors gets half the budget."""
    how = recipe("digits")
    choices = Choices(
        num_workers=8, model="cnn-gn", partition="dirichlet", concentration=0.1, seed=seed
    )
    spent = budget / parsed.messages if (parsed := parse_momentum(momentum)) else budget
    made = plan(families.paper("er8"), spent, strategy, seed=seed, wire=wire)
    settings = how.settings(epochs=EPOCHS, momentum=momentum, evaluate_every=EPOCHS)
    *_, last = Simulation(how.task(choices), made, settings)
    return {
        "case": [strategy, budget, wire, momentum],
        "seed": seed,
        "test_accuracy": last.test_accuracy,
        "train_loss": last.train_loss,
    }


COLUMNS = [
    Column("strategy", "strategy"),
    Column("bytes", "budget", "g"),
    Column("wire", "wire"),
    Column("momentum", "momentum"),
    Column("accuracy", "accuracy", ".1f"),
    Column("range", "range", ">s"),
    Column("loss", "loss", ".2f"),
    Column("seeds", "seeds", "d"),
    Column("diverged", "diverged", "d"),
]


def describe(document: dict[str, Any]) -> str:
    """A line per case: means over seeds that did not diverge, and the least and the greatest."""
    rows = []
    for case in CASES:
        found = [r for r in document["runs"] if r["case"] == list(case)]
        ended = [r for r in found if r["train_loss"] is not None]
        if not ended:
            continue
        scores = [100 * r["test_accuracy"] for r in ended]
        row: dict[str, Any] = dict(
            zip(("strategy", "budget", "wire", "momentum"), case, strict=True)
        )
        row |= {"accuracy": fmean(scores), "range": f"{min(scores):.1f}–{max(scores):.1f}"}
        row |= {"loss": fmean(r["train_loss"] for r in ended)}
        rows.append(row | {"seeds": len(found), "diverged": len(found) - len(ended)})
    return "\n".join(
        [table(COLUMNS, rows), *map(_verdict, ("float32", "modulo:3"), [document] * 2)]
    )


def _verdict(wire: str, document: dict[str, Any]) -> str:
    """How `auto` stands beside the best single rule."""
    scores: dict[str, list[float]] = {}
    for run in document["runs"]:
        strategy, _, over, momentum = run["case"]
        if (strategy, over) == ("greedy", wire):
            scores.setdefault(momentum, []).append(100 * (run["test_accuracy"] or 0.0))
    ours = scores.pop("auto", [])
    if len(ours) < 2:
        return f"{wire}: auto was not run"
    best = max(scores, key=lambda momentum: fmean(scores[momentum]))
    ahead, spread = fmean(ours) - fmean(scores[best]), stdev(scores[best])
    verdict = "holds" if ahead >= -spread else "does not hold"
    return (
        f"{wire}: auto is {ahead:+.1f} points from the best single rule, {best}, whose spread over "
        f"seeds is {spread:.1f}: never worse by more {verdict}"
    )


def main() -> None:
    options = parser(__doc__, output="differing")
    options.add_argument("--runs", type=int, default=len(CASES) * len(SEEDS))
    args = options.parse_args()
    torch.set_num_threads(1)
    runs = (earlier(args.output) or {"runs": []})["runs"]
    done = {(*r["case"], r["seed"]) for r in runs}
    missing = [(*case, seed) for seed in SEEDS for case in CASES if (*case, seed) not in done]
    document = {"benchmark": "differing", "epochs": EPOCHS, "runs": runs}
    for case in missing[: args.runs]:
        runs.append(run(*case))
        write(args.output, document, describe(document))
    print(describe(document))


if __name__ == "__main__":
    main()
