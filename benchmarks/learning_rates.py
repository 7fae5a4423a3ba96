"""Which learning rates each strategy survives, and what it reaches: digits on geometric16-d10.

    python benchmarks/learning_rates.py --output benchmarks/results/learning_rates.json

The spectral-norm-optimal weight of vanilla and periodic gives W eigenvalues down to −√ρ, and a
worker a negative weight for its own model. Momentum makes such modes unstable early: for a
quadratic of curvature h, heavy-ball momentum μ and an eigenvalue w < 0 of W, the deviation from the
mean grows unless ηh < (1 − w)(1 − μ)/|w|, twenty times below the limit for w > 0.
"""

from __future__ import annotations

from typing import Any

from harness import Column, finish, parser, table

from matcha.simulation import SGD, Delays, Engine, Settings, Simulation
from matcha.strategies import plan as make_plan
from matcha.strategies import with_budget
from matcha.topology import families
from matcha.zoo.recipes import Choices, recipe

GRAPH = "geometric16-d10"
RUNS = [
    ("vanilla", 1.0),
    ("periodic", 0.4),
    ("matcha", 0.4),
    ("greedy", 0.4),
    ("periodic", 0.1),
    ("matcha", 0.1),
    ("greedy", 0.1),
]
OPTIMIZERS = {
    "momentum 0.9": (SGD(momentum=0.9, nesterov=True, weight_decay=1e-4), (0.02, 0.05, 0.1, 0.2)),
    "no momentum": (SGD(weight_decay=1e-4), (0.2, 0.5, 1.0, 2.0)),
}


COLUMNS = [
    Column("optimizer", "optimizer"),
    Column("run", "run"),
    Column("rate", "rate", "g"),
    Column("training loss", "train_loss", ".4f"),
    Column("test accuracy", "test_accuracy", ".1%"),
]


def describe(document: dict[str, Any]) -> str:
    """A line per training."""
    return table(COLUMNS, document["rows"])


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--epochs", type=int, default=10)
    args = options.parse_args()
    how = recipe("digits")
    task = how.task(Choices(num_workers=16, batch_size=8))
    rows = []
    for name, (optimizer, rates) in OPTIMIZERS.items():
        engine = Engine(task, optimizer)
        for strategy, budget in RUNS:
            # As in the reproduction: the paper's strategies take the authors' decomposition.
            matchings = None if strategy == "greedy" else families.paper_matchings(GRAPH)
            plan = make_plan(families.paper(GRAPH), budget, strategy, matchings=matchings)
            for rate in rates:
                settings = Settings(
                    epochs=args.epochs,
                    schedule=how.schedule(args.epochs, rate),
                    optimizer=optimizer,
                    evaluate_every=args.epochs,
                    delays=Delays(compute_time=1.0),
                )
                simulation = Simulation(task, plan, settings, engine=engine)
                *_, last = simulation
                row = {"optimizer": name, "run": with_budget(strategy, budget), "rate": rate}
                row["train_loss"] = None if simulation.progress.diverged else last.train_loss
                rows.append(row | {"test_accuracy": last.test_accuracy})
    graph = f"paper:{GRAPH}"
    document = {"graph": graph, "task": "digits", "epochs": args.epochs, "rows": rows}
    finish(args.output, document, describe(document))


if __name__ == "__main__":
    main()
