"""Whether `matcha.tune` chooses well: strategy, budget and wire against all combinations.

    python benchmarks/tuning.py             # ten tasks, about fifteen minutes of one core
    python benchmarks/tuning.py --quick     # one task, few combinations; writes nothing
    python benchmarks/tuning.py --seconds 400     # begin no task later; the same command goes on

For each task every combination trains, on seeds that tuning did not see, until the average model
holds the target: the training loss that exact averaging holds after two thirds of its epochs. Time
is the delay model's, so a loaded machine changes nothing. The tasks were written down before any of
them was run, and nothing was adjusted afterwards; what tuning was developed on is digits in shards
and logistic regression, both on paper:er8. Writes benchmarks/results/tuning.json and .txt.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
import torch
from harness import RESULTS
from torch import nn

import matcha
from matcha import Plan, families
from matcha.errors import InputError
from matcha.simulation import SGD, Adam, Constant, Settings, Task, TaskTrials
from matcha.strategies import strategy_with
from matcha.training.optimizers import Optimizer
from matcha.tuning import TunedPoint, Tuning
from matcha.zoo.data import digits
from matcha.zoo.quadratics import QuadraticTask
from matcha.zoo.recipes import Choices, recipe
from matcha.zoo.tensors import TensorTask

PARTS = RESULTS / "tuning-trials.jsonl"
"""Single trials of a benchmark that is not finished."""
BUDGETS = (0.005, 0.02, 0.05, 0.1, 0.3, 1.0)
WIRES = ("float32", "modulo:8", "modulo:4", "modulo:3")
STRATEGIES = ("greedy", "matcha", "vanilla")
TRIAL_SEED, SEEDS = 0, (1, 2)
NEAR = 0.15


class Remembered:
    """Trials whose answers are kept in a file, so that a benchmark that was stopped goes on."""

    def __init__(self, trials: TaskTrials, name: str) -> None:
        self.trials, self.name = trials, name
        self.exact_iterations = trials.exact_iterations
        lines = PARTS.read_text().splitlines() if PARTS.exists() else []
        self.known = {
            label: (limit, math.inf if needed is None else needed)
            for whose, label, limit, needed in map(json.loads, lines)
            if whose == name
        }

    def __call__(self, plan: Plan, limit: float) -> float:
        """As the trials'; what is known needs none."""
        label = f"{plan.strategy} {plan.budget:g} {plan.wire.name}"
        tried, needed = self.known.get(label, (0.0, math.inf))
        if math.isinf(needed) and tried < limit:
            needed = self.trials(plan, limit)
            self.known[label] = (limit, needed)
            kept = [self.name, label, limit, None if math.isinf(needed) else needed]
            with PARTS.open("a") as file:
                file.write(json.dumps(kept) + "\n")
        return needed if needed <= limit else math.inf


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A task on a network."""

    name: str
    topology: str
    make: Callable[[int, int], Task]
    """Of a number of workers and a seed."""
    compute: float
    link: float
    latency: float
    rate: float
    optimizer: Optimizer = field(default_factory=SGD)
    epochs: int = 12

    def trials(self, seed: int) -> Remembered:
        """Train the whole task, under a seed."""
        graph = families.parse(self.topology)
        settings = Settings(
            epochs=self.epochs, schedule=Constant(base=self.rate), optimizer=self.optimizer
        )
        trials = TaskTrials(self.make(graph.num_workers, seed), graph, settings)
        return Remembered(trials, f"{self.name}, seed {seed}")

    def tune(
        self, trials: Remembered | None, wires: Sequence[str], budgets: Sequence[float]
    ) -> Tuning:
        """The choice, by theory alone without trials."""
        return matcha.tune(
            families.parse(self.topology),
            compute_time=self.compute,
            link_time=self.link,
            latency=self.latency,
            strategies=[strategy_with(name, effort="none") for name in STRATEGIES],
            budgets=budgets,
            wires=wires,
            trials=trials,
        )


def named(name: str, **choices: Any) -> Callable[[int, int], Task]:
    """A recipe's task."""
    return lambda m, seed: recipe(name).task(Choices(num_workers=m, seed=seed, **choices))


def perceptron(m: int, seed: int) -> Task:
    """A perceptron with one hidden layer on the digits."""
    images = digits()
    pixels = torch.from_numpy(images.train_images.reshape(len(images.train_images), -1)).float()
    scaled = pixels / pixels.abs().max()
    labels = torch.from_numpy(images.train_labels).long()
    model = lambda: nn.Sequential(nn.Linear(scaled.shape[1], 48), nn.ReLU(), nn.Linear(48, 10))  # noqa: E731
    return TensorTask(model, scaled, labels, num_workers=m, seed=seed, name="perceptron")


def regression(m: int, seed: int) -> Task:
    """A student of a teacher's answers, with noise."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(1500, 20, generator=draw)
    teacher = torch.tanh(x @ torch.randn(20, 16, generator=draw) / 4)
    y = teacher @ torch.randn(16, 1, generator=draw) + 0.1 * torch.randn(1500, 1, generator=draw)
    model = lambda: nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 1))  # noqa: E731
    return TensorTask(
        model, x, y, num_workers=m, seed=seed, loss=nn.functional.mse_loss, name="regression"
    )


MOMENTUM = SGD(momentum=0.9, nesterov=True)
WORKLOADS = (
    Workload(name="logistic", topology="ring:8", make=named("logistic"),
             compute=0.05, link=0.2, latency=0.001, rate=0.2),
    Workload(name="logistic, shards", topology="paper:geometric16-d10",
             make=named("logistic", partition="shards", batch_size=8),
             compute=0.1, link=0.1, latency=0.002, rate=0.1),
    Workload(name="digits CNN, Dirichlet", topology="hypercube:3",
             make=named("digits", partition="dirichlet", concentration=0.3),
             compute=0.1, link=0.3, latency=0.005, rate=0.05, optimizer=MOMENTUM, epochs=9),
    Workload(name="digits CNN, long ways", topology="torus:2x4",
             make=named("digits", model="cnn-gn"),
             compute=0.1, link=0.06, latency=0.03, rate=0.05, optimizer=MOMENTUM, epochs=9),
    Workload(name="perceptron", topology="erdos-renyi:12:0.35:3", make=perceptron,
             compute=0.02, link=0.2, latency=0.002, rate=0.5),
    Workload(name="regression", topology="star:8", make=regression,
             compute=0.1, link=0.05, latency=0.0, rate=0.1),
    Workload(name="quadratic, unlike", topology="geometric:10:0.5:4",
             make=lambda m, seed: QuadraticTask(
                 m, heterogeneity=1.0, seed=seed, dimension=300, steps_per_epoch=10, start=4.0
             ), compute=0.1, link=0.1, latency=0.005, rate=0.2),
    Workload(name="logistic, quick links", topology="paper:er16",
             make=named("logistic", partition="dirichlet", concentration=0.2, batch_size=8),
             compute=0.2, link=0.005, latency=0.001, rate=0.1),
    Workload(name="perceptron, bridge", topology="barbell:8", make=perceptron,
             compute=0.05, link=0.1, latency=0.01, rate=0.3),
    Workload(name="digits CNN, Adam", topology="path:6",
             make=named("digits", partition="shards"),
             compute=0.1, link=0.4, latency=0.004, rate=0.003, optimizer=Adam(), epochs=9),
)  # fmt: skip


def verify(
    workload: Workload,
    wires: Sequence[str] = WIRES,
    budgets: Sequence[float] = BUDGETS,
    seeds: Sequence[int] = SEEDS,
) -> dict[str, Any]:
    """Tune, then train every combination on other seeds: how far the choice is from the best."""
    theory = workload.tune(None, wires, budgets)
    measure = Measure(workload, [workload.trials(seed) for seed in seeds])
    try:
        tuned = workload.tune(workload.trials(TRIAL_SEED), wires, budgets)
    except InputError:  # no plan that was tried reached the target
        points, num_tried, chosen, label = theory.points, None, math.inf, "none"
    else:
        points, num_tried = tuned.points, tuned.num_tried
        chosen, label = measure(tuned.best, math.inf), tuned.best.label
    best, best_label = chosen, label
    by_theory = math.inf
    for point in sorted(points, key=lambda p: p.seconds):
        is_theory = (point.strategy, point.budget, point.wire) == (
            theory.best.strategy, theory.best.budget, theory.best.wire
        )  # fmt: skip
        seconds = measure(point, math.inf if is_theory else best)
        by_theory = seconds if is_theory else by_theory
        if seconds < best:
            best, best_label = seconds, point.label
    return {
        "task": workload.name,
        "topology": workload.topology,
        "compute": workload.compute,
        "link": workload.link,
        "latency": workload.latency,
        "combinations": len(points),
        "trials": num_tried,
        "choice": label,
        "seconds": chosen,
        "best": best_label,
        "best_seconds": best,
        "excess": _excess(chosen, best),
        "theory": theory.best.label,
        "theory_excess": _excess(by_theory, best),
    }


def _excess(seconds: float, best: float) -> float:
    return seconds / best - 1 if math.isfinite(seconds) else math.inf


def mean_seconds(trials: Sequence[Remembered], plan: Plan, each: float, limit: float) -> float:
    """Mean seconds to the target over the seeds, at so many per iteration.

    Infinite where the limit, or six times exact averaging's iterations, is passed: what cannot
    beat a limit ends early.
    """
    left, total = len(trials) * limit / each, 0.0
    for place, one in enumerate(trials):
        # No choice is expected to need a fifth less than exact averaging does.
        to_come = sum(0.8 * t.exact_iterations for t in trials[place + 1 :])
        allowed = min(6 * one.exact_iterations, left - total - to_come)
        needed = one(plan, allowed) if allowed > 0 else math.inf
        if not math.isfinite(needed):
            return math.inf
        total += needed
    return total / len(trials) * each


class Measure:
    """Mean seconds to the target over the seeds, of a point of `tune`."""

    def __init__(self, workload: Workload, trials: Sequence[Remembered]) -> None:
        self.workload, self.trials = workload, trials

    def __call__(self, point: TunedPoint, limit: float) -> float:
        """Infinite where the limit cannot be beaten."""
        return mean_seconds(self.trials, self._plan(point), point.iteration_seconds, limit)

    def _plan(self, point: TunedPoint) -> Plan:
        graph = families.parse(self.workload.topology)
        number = len(graph.links)
        if self.workload.latency:
            link, latency = self.workload.link, self.workload.latency
            graph = graph.with_link_times([link] * number, [latency] * number)
        return matcha.plan(
            graph, point.budget, strategy_with(point.strategy, effort="none"), wire=point.wire
        )


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['task']:22s} {row['topology']:22s} {row['choice']:>22s} "
        f"{row['trials'] or '–':>6} {_seconds(row['seconds']):>8s} "
        f"{row['best']:>22s} {_seconds(row['best_seconds']):>8s} "
        f"{_percent(row['excess']):>8s} {row['theory']:>22s} {_percent(row['theory_excess']):>8s}"
    )


def _seconds(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.4g}"


def _percent(value: float | None) -> str:
    return "never" if value is None or not math.isfinite(value) else f"{100 * value:.1f} %"


def describe(rows: Sequence[dict[str, Any]]) -> str:
    near, theory = (
        sum(row[key] is not None and row[key] <= NEAR for row in rows)
        for key in ("excess", "theory_excess")
    )
    return "\n".join(
        [
            "matcha.tune's choice against every combination of strategy, budget and wire: seconds "
            "of the delay model until",
            "the average model holds the target, on two seeds that tuning did not see.",
            f"{'task':22s} {'topology':22s} {'choice':>22s} {'trials':>6s} {'seconds':>8s} "
            f"{'best':>22s} {'seconds':>8s} {'excess':>8s} {'theory alone':>22s} {'excess':>8s}",
            *map(line, rows),
            f"with trials: {near} of {len(rows)} within 15 % of the best; "
            f"theory alone: {theory} of {len(rows)}",
        ]
    )


def main() -> None:
    global PARTS
    parser = harness.parser(__doc__, output="tuning")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--again", action="store_true", help="forget earlier results")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no task after these")
    options = parser.parse_args()
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            PARTS = Path(folder) / PARTS.name
            print(describe([verify(WORKLOADS[0], WIRES[::2], (0.02, 0.3), seeds=(1,))]))
        return
    known = [] if options.again else harness.earlier(options.output) or []
    done = {row["task"]: row for row in known if "wires" in row}
    started = time.monotonic()
    for workload in WORKLOADS:
        if workload.name in done or time.monotonic() - started > options.seconds:
            continue
        row = verify(workload) | {"wires": list(WIRES), "budgets": list(BUDGETS)}
        plain = {k: None if v == math.inf else v for k, v in row.items()}
        done[workload.name] = plain
        print(line(plain), f"({time.monotonic() - started:.0f} s)", flush=True)
        harness.write(options.output, list(done.values()))
    if len(done) == len(WORKLOADS):
        PARTS.unlink(missing_ok=True)
    harness.finish(options.output, list(done.values()), describe(list(done.values())))


if __name__ == "__main__":
    main()
