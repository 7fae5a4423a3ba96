"""Is `matcha advise` right? Its recommendation beside every combination, on tasks it never saw.

    python benchmarks/advise.py        # what is not measured yet; writes benchmarks/results/advise
    python benchmarks/advise.py --fit  # measures what disagreement costs: `COSTS` in tuning/advice
    python benchmarks/advise.py --only perceptron --seconds 400
    sudo python benchmarks/advise.py --headline  # on the shaped network of network/headline.py

The tasks and networks are those of benchmarks/tuning.py, written down long before there was an
`advise`. It is told speeds, seconds per step, whether workers' data are alike, and whether the
optimizer has momentum; nothing of the model, loss or rate. The other combinations are greedy at
each budget over each wire, local SGD at each, DDP, and what was best in benchmarks/tuning.py,
which tried vanilla and matcha too. Each is trained until the average model holds the target, on two
seeds; seconds are the delay model's. DDP is given two thirds of computing to average beside.

The last rows are the headline's network, eight hosts whose cards are shaped to 200 Mbit/s, with a
core per host by dilated time, from benchmarks/results/headline.json: the recommendation among all
that was measured there and exchanges in step, as it does. `--headline` measures it where it is
missing.

`--fit` measures iterations to the target on eight other tasks on paper:er8 and takes, for each, the
cost per unit of disagreement that explains them best, in logarithms.
"""

from __future__ import annotations

import json
import math
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import harness
import tuning
from harness import RESULTS, Column, table

import matcha
from matcha import Plan, Topology, families
from matcha.simulation import SGD, Constant, Settings, TaskTrials
from matcha.strategies import strategy_with
from matcha.tuning import Advice, advise
from matcha.tuning.search import disagreement
from matcha.zoo.recipes import Choices, recipe

tuning.PARTS = RESULTS / "advise-trials.jsonl"
ALIKE = {
    "logistic", "digits CNN, long ways", "perceptron", "regression", "perceptron, bridge",
}  # fmt: skip
"""Of the tasks, those whose workers draw from the same data."""
NEAR = 0.10
FITTED_PLANS = (
    ("greedy", 0.3, "modulo:4"), ("greedy", 0.05, "modulo:4"), ("greedy", 0.02, "modulo:4"),
    ("greedy", 0.005, "modulo:4"), ("greedy", 0.02, "float32"), ("greedy", 0.01, "float32"),
    ("greedy", 0.005, "float32"), ("local", 0.05, "float32"), ("local", 0.02, "float32"),
)  # fmt: skip


def network(workload: tuning.Workload) -> Topology:
    """A task's topology with the times of its links."""
    graph = families.parse(workload.topology)
    number = len(graph.links)
    return graph.with_link_times([workload.link] * number, [workload.latency] * number)


def others(workload: tuning.Workload, found: Advice, known: str) -> list[tuple[str, Plan, float]]:
    """Every other combination: its name, its plan, and its seconds per iteration."""
    graph = network(workload)
    wanted = [("greedy", budget, wire) for budget in tuning.BUDGETS for wire in tuning.WIRES] + [
        ("local", budget, "float32") for budget in tuning.BUDGETS
    ]
    name, *rest = known.split()
    budget = float(rest.pop(0)) if rest and name != "vanilla" else 1.0
    wanted.append((name, budget, rest[0] if rest else "float32"))
    made = {}
    for strategy, budget, wire in dict.fromkeys(wanted):
        plan = matcha.plan(graph, budget, strategy_with(strategy, effort="none"), wire=wire)
        seconds = workload.compute + plan.expected_comm_time
        made[f"{strategy} {budget:g} {wire}"] = (plan, seconds)
    rows = [(c.name, c.plan, c.iteration_seconds) for c in found.choices if c is not found.best]
    return sorted([*rows, *((n, *pair) for n, pair in made.items())], key=lambda row: row[2])


def verify(workload: tuning.Workload, known: str) -> dict[str, Any]:
    """The recommendation of one task, and the best of all."""
    found = advise(
        network(workload),
        compute_time=workload.compute,
        alike=workload.name in ALIKE,
        momentum=workload.optimizer != PLAIN,
    )
    trials = [workload.trials(seed) for seed in tuning.SEEDS]
    chosen = tuning.mean_seconds(trials, found.best.plan, found.best.iteration_seconds, math.inf)
    best, name = chosen, found.best.name
    for label, plan, each in others(workload, found, known):
        seconds = tuning.mean_seconds(trials, plan, each, best)
        if seconds < best:
            best, name = seconds, label
    ddp = found.choices[0]
    exact = sum(t.exact_iterations for t in trials) / len(trials)
    return {
        "task": workload.name,
        "topology": workload.topology,
        "advice": found.best.name,
        "seconds": chosen if math.isfinite(chosen) else None,
        "best": name,
        "best_seconds": best,
        "excess": chosen / best - 1 if math.isfinite(chosen) else None,
        "ddp_seconds": exact * ddp.iteration_seconds,
    }


PLAIN, MOMENTUM = SGD(), SGD(momentum=0.9, nesterov=True)
FITTED = {
    "alike": {
        "plain": (("logistic", {}, 0.1), ("digits", {}, 0.3)),
        "momentum": (("logistic", {}, 0.05), ("digits", {}, 0.05)),
    },
    "different": {
        "plain": (
            ("logistic", {"partition": "shards"}, 0.1),
            ("digits", {"partition": "dirichlet", "model": "cnn-gn"}, 0.3),
        ),
        "momentum": (
            ("logistic", {"partition": "shards"}, 0.05),
            ("digits", {"partition": "dirichlet", "model": "cnn-gn"}, 0.05),
        ),
    },
}
"""Task, choices and learning rate of the two references of each kind."""


def fit() -> dict[str, dict[str, list[float]]]:
    """The share of more iterations per unit of disagreement, on the references."""
    optimizers = {"plain": PLAIN, "momentum": MOMENTUM}
    return {
        data: {
            kind: [fit_one(*reference, optimizers[kind]) for reference in references]
            for kind, references in kinds.items()
        }
        for data, kinds in FITTED.items()
    }


def fit_one(task: str, choices: dict[str, Any], rate: float, optimizer: SGD) -> float:
    """One reference's cost: the one that explains its iterations best, in logarithms."""
    graph, points = families.paper("er8"), []
    for seed in (5, 6):
        trials = TaskTrials(
            recipe(task).task(Choices(num_workers=8, seed=seed, **choices)),
            graph,
            Settings(epochs=12, schedule=Constant(base=rate), optimizer=optimizer),
        )
        for strategy, budget, wire in FITTED_PLANS:
            plan = matcha.plan(graph, budget, strategy_with(strategy, effort="none"), wire=wire)
            needed = trials(plan, 8 * trials.exact_iterations) / trials.exact_iterations
            if math.isfinite(needed):
                points.append((disagreement(plan), needed))
    costs = [10 ** (k / 100) for k in range(-500, 100)]
    cost = min(costs, key=lambda c: sum(math.log((1 + c * d) / n) ** 2 for d, n in points))
    print(task, choices, rate, optimizer, f"{cost:.2g}", points, flush=True)
    return round(cost, 5)


def on_headline(*, measure: bool) -> list[dict[str, Any]]:
    """The recommendation on the headline's network, where it was measured, and the best there."""
    sys.path.append(str(Path(__file__).parent / "network"))
    import headline

    rows = []
    for entry in harness.earlier(harness.COMMITTED / "headline")["sizes"]:
        advice = advise(
            families.paper("er8"),
            compute_time=headline.COMPUTE_SECONDS,
            model_mb=entry["bytes"] / 1e6,
            link_mbps=headline.MBPS,
            alike=True,
        )
        best, size = advice.best, entry["size"]
        known = {
            row["method"]: row["seconds"]
            for row in entry["core_each"]["rows"]
            if "overlap" not in row["method"] and row["seconds"] is not None
        }
        if measure and best.name not in known:
            headline.OURS[:] = [
                ("greedy", budget, wire, False)
                for budget, wire in {
                    (best.budget, best.wire), (0.005, "modulo:4"), (0.02, "modulo:4"),
                }
            ]  # fmt: skip
            found: dict[str, Any] = {}
            parts = ["iterations", "core_each"]
            options = Namespace(only=["greedy"], parts=parts, mbps=headline.MBPS)
            headline.measure(found, size, options)
            known |= {row["method"]: row["seconds"] for row in headline.rows(found, "core_each")}
        if best.name not in known:
            continue
        name = min(known, key=known.__getitem__)
        rows.append(
            {
                "task": f"headline, {size}",
                "topology": "paper:er8, shaped",
                "advice": best.name,
                "seconds": known[best.name],
                "best": name,
                "best_seconds": known[name],
                "excess": known[best.name] / known[name] - 1,
                "ddp_seconds": known.get("DDP"),
            }
        )
    return rows


COLUMNS = [
    Column("task", "task"),
    Column("topology", "topology"),
    Column("advice", "advice"),
    Column("seconds", "seconds", ".4g"),
    Column("best of all", "best"),
    Column("seconds", "best_seconds", ".4g"),
    Column("excess %", lambda r: None if r["excess"] is None else 100 * r["excess"], ".1f"),
    Column("DDP seconds", "ddp_seconds", ".4g"),
]


def describe(document: dict[str, Any]) -> str:
    rows = document["rows"]
    near = sum(row["excess"] is not None and row["excess"] <= NEAR for row in rows)
    return "\n".join(
        [
            "What `matcha advise` recommends, told only speeds, seconds per step and whether data "
            "are alike, beside",
            "the best of every combination: seconds to the target, of the delay model over two "
            "seeds; the headline's are measured.",
            table(COLUMNS, rows),
            f"within 10 % of the best: {near} of {len(rows)}",
        ]
    )


def main() -> None:
    parser = harness.parser(__doc__, output="advise")
    parser.add_argument("--fit", action="store_true", help="measure the costs of disagreement")
    parser.add_argument("--headline", action="store_true", help="measure on the shaped network")
    parser.add_argument("--only", default="", help="only tasks whose name holds this")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no task after these")
    options = parser.parse_args()
    document = harness.earlier(options.output) or {"costs": {}, "rows": []}
    if options.fit:
        document["costs"] = fit()
        print(json.dumps(document["costs"], indent=1))
        harness.write(options.output, document)
        return
    if options.headline:
        rows = {row["task"]: row for row in [*document["rows"], *on_headline(measure=True)]}
        document["rows"] = list(rows.values())
        harness.finish(options.output, document, describe(document))
        return
    known = {row["task"]: row["best"] for row in harness.earlier(RESULTS / "tuning")}
    started = time.monotonic()
    for workload in tuning.WORKLOADS:
        done = {row["task"] for row in document["rows"]}
        if workload.name in done or options.only not in workload.name:
            continue
        if time.monotonic() - started > options.seconds:
            break
        row = verify(workload, known[workload.name])
        # Several processes may each measure some tasks.
        document = harness.earlier(options.output) or document
        document["rows"].append(row)
        harness.write(options.output, document)
        print(row, flush=True)
    rows = {row["task"]: row for row in [*document["rows"], *on_headline(measure=False)]}
    document["rows"] = list(rows.values())
    order = {workload.name: place for place, workload in enumerate(tuning.WORKLOADS)}
    document["rows"].sort(key=lambda row: order.get(row["task"], len(order)))
    harness.finish(options.output, document, describe(document))


if __name__ == "__main__":
    main()
