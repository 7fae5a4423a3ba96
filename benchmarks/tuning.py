"""Whether `matcha.tune` chooses well: its choice against brute force, by simulation.

    python benchmarks/tuning.py            # about ten minutes
    python benchmarks/tuning.py --quick    # one task, a few points

For each task every plan is simulated at many learning rates until the mean of F(x_i) − F* over
workers reaches the target; brute force takes the fastest of all. The first tasks were at hand while
the predictor was made; the held-out ones were written down afterwards and run once. Writes
benchmarks/results/tuning.json and .txt.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import matcha
from matcha import Plan, Topology, families
from matcha.schedules import Bernoulli
from matcha.tuning import DEFAULT_BUDGETS, DEFAULT_STRATEGIES, Problem, TunedPoint

RESULTS = Path(__file__).parent / "results"
Array = npt.NDArray[np.float64]
SEEDS = 6
MAX_ITERATIONS = 3000
RATES = tuple(2.0 ** (-k / 2) for k in range(13))
"""Learning rates tried, as fractions of 1/L."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A task that can be simulated: F, its gradients at each worker, and its constants."""

    name: str
    topology: Topology
    compute_time: float
    link_time: float
    problem: Problem
    start: Array
    gradients: Callable[[Array, np.random.Generator], Array]
    """Stochastic gradients; x has shape (seeds, workers, parameters)."""
    gap: Callable[[Array], Array]
    """F(x) − F* along the last axis."""


def quadratic(
    name: str, topology: Topology, *, dissimilarity: float, compute: float, link: float
) -> Workload:
    """½ xᵀHx with curvatures from 0.05 to 1; workers' own minima differ by unlike data."""
    d, m = 20, topology.num_workers
    rng = np.random.default_rng(0)
    h = np.geomspace(0.05, 1.0, d)
    shift = rng.standard_normal((m, d))
    shift -= shift.mean(axis=0)
    shift *= math.sqrt(dissimilarity / (np.square(shift).sum() / m)) if dissimilarity else 0.0
    start = np.full(d, 1.0) * np.sqrt(2 / h.sum())
    noise = math.sqrt(1 / d)
    return Workload(
        name=name,
        topology=topology,
        compute_time=compute,
        link_time=link,
        problem=Problem(
            smoothness=1.0,
            curvature=float(h.mean()),
            strong_convexity=0.05,
            gradient_variance=1.0,
            dissimilarity=dissimilarity,
            initial_gap=1.0,
            target=0.01,
        ),
        start=start,
        gradients=lambda x, rng: x * h + shift + noise * rng.standard_normal(x.shape),
        gap=lambda x: 0.5 * np.square(x) @ h,
    )


def logistic(name: str, topology: Topology, *, compute: float, link: float) -> Workload:
    """Regularised logistic regression on synthetic data, one shard a worker, batches of 4."""
    from scipy.optimize import minimize

    m, d, n, penalty = topology.num_workers, 8, 30, 0.1
    rng = np.random.default_rng(1)
    truth = rng.standard_normal(d)
    features = rng.standard_normal((m, n, d)) + 0.3 * rng.standard_normal((m, 1, d))
    labels = np.where(rng.random((m, n)) < 1 / (1 + np.exp(-features @ truth)), 1.0, -1.0)
    signed = features * labels[..., None]
    pool = signed.reshape(-1, d)

    def loss(x: Array) -> Array:
        margins = x @ pool.T
        value: Array = np.logaddexp(0, -margins).mean(axis=-1)
        return value + penalty / 2 * np.square(x).sum(axis=-1)

    def slope(x: Array, rows: Array) -> Array:
        """Mean gradient over rows; x (…, d), rows (…, batch, d)."""
        pull = -1 / (1 + np.exp(np.einsum("...bd,...d->...b", rows, x)))
        result: Array = np.einsum("...b,...bd->...d", pull, rows) / rows.shape[-2] + penalty * x
        return result

    best = minimize(loss, np.zeros(d), jac=lambda x: slope(x, pool), tol=1e-12)
    # The constants, measured at the optimum and at the start, as a user could.
    s = 1 / (1 + np.exp(-pool @ best.x))
    hessian = (pool * (s * (1 - s))[:, None]).T @ pool / len(pool) + penalty * np.eye(d)
    curvatures = np.linalg.eigvalsh(hessian)
    each = slope(np.broadcast_to(best.x, (m, n, d)), signed[:, :, None, :])
    means = each.mean(axis=1)
    variance = float(np.square(each - means[:, None]).sum(axis=-1).mean()) / 4
    unlike = float(np.square(means - means.mean(axis=0)).sum(axis=-1).mean())
    start = np.zeros(d)
    top = float(np.linalg.eigvalsh(pool.T @ pool / len(pool) / 4)[-1] + penalty)

    def gradients(x: Array, rng: np.random.Generator) -> Array:
        picks = rng.integers(0, n, (*x.shape[:2], 4))
        return slope(x, signed[np.arange(m)[None, :, None], picks])

    gap0 = float(loss(start) - best.fun)
    return Workload(
        name=name,
        topology=topology,
        compute_time=compute,
        link_time=link,
        problem=Problem(
            smoothness=top,
            curvature=float(curvatures.mean()),
            strong_convexity=float(curvatures[0]),
            gradient_variance=variance,
            dissimilarity=unlike,
            initial_gap=gap0,
            target=0.03 * gap0,
        ),
        start=start,
        gradients=gradients,
        gap=lambda x: loss(x) - best.fun,
    )


def iterations_needed(workload: Workload, plan: Plan, rate: float, limit: int) -> float:
    """Iterations until the gap, averaged over workers and seeds, is at most the target.

    Every seed has its own noise and, where rounds are random, its own rounds: the best of many
    plans would otherwise be the one with the luckiest draw.
    """
    m, rng = plan.num_workers, np.random.default_rng(7)
    x = np.broadcast_to(workload.start, (SEEDS, m, len(workload.start))).copy()
    known: dict[tuple[int, ...], Array] = {(): np.eye(m)}
    smoothed = workload.problem.initial_gap
    rounds = zip(*(each.rounds(0, limit) for each in reseeded(plan)), strict=True)
    for k, together in enumerate(rounds):
        x -= rate * workload.gradients(x, rng)
        if any(together):
            for round_ in together:
                if round_.indices not in known:
                    known[round_.indices] = round_.matrix(m)
            x = np.stack([known[round_.indices] for round_ in together]) @ x
        if k % 2:
            continue
        # A very short running mean: a lucky moment is not an arrival, a long one would be late.
        now = float(workload.gap(x).mean())
        if not now < 1e3:
            return math.inf
        smoothed += 0.6 * (now - smoothed)
        if smoothed <= workload.problem.target:
            return k + 1.0
    return math.inf


def reseeded(plan: Plan) -> list[Plan]:
    """The plan once a seed, with other draws where it draws."""
    if not isinstance(plan.schedule, Bernoulli):
        return [plan] * SEEDS
    return [replace(plan, schedule=replace(plan.schedule, seed=s)) for s in range(SEEDS)]


def simulated_seconds(
    workload: Workload, plan: Plan, point: TunedPoint, rates: tuple[float, ...], best: float
) -> tuple[float, float]:
    """The least time to the target over learning rates, and its rate; beaten runs end early."""
    found, at = math.inf, math.nan
    for rate in rates:
        limit = min(MAX_ITERATIONS, min(found, 1.6 * best) / point.iteration_seconds + 1)
        needed = iterations_needed(workload, plan, rate, math.ceil(limit))
        if needed * point.iteration_seconds < found:
            found, at = needed * point.iteration_seconds, rate
    return found, at


def verify(
    workload: Workload,
    strategies: tuple[str, ...] = DEFAULT_STRATEGIES,
    budgets: tuple[float, ...] = DEFAULT_BUDGETS,
    rates: tuple[float, ...] = RATES,
) -> dict[str, Any]:
    """Tune, then simulate every point; how far the choice is from the best of them."""
    tuning = matcha.tune(
        workload.topology,
        compute_time=workload.compute_time,
        link_time=workload.link_time,
        problem=workload.problem,
        strategies=strategies,
        budgets=budgets,
        effort="none",
    )
    scaled = tuple(rate / workload.problem.smoothness for rate in rates)
    chosen, rate = simulated_seconds(workload, tuning.plan, tuning.best, scaled, math.inf)
    alone = iterations_needed(workload, tuning.plan, tuning.best.learning_rate, MAX_ITERATIONS)
    best, best_point, best_rate = chosen, tuning.best, rate
    for point in tuning.points:
        if point == tuning.best:
            continue
        plan = matcha.plan(workload.topology, point.budget, point.strategy, effort="none")
        seconds, rate = simulated_seconds(workload, plan, point, scaled, best)
        if seconds < best:
            best, best_point, best_rate = seconds, point, rate
    return {
        "task": workload.name,
        "topology": workload.topology.name,
        "compute_time": workload.compute_time,
        "link_time": workload.link_time,
        "choice": [tuning.best.strategy, tuning.best.budget],
        "predicted_seconds": tuning.best.seconds,
        "simulated_seconds": chosen,
        "simulated_seconds_at_predicted_rate": alone * tuning.best.iteration_seconds,
        "predicted_rate": tuning.best.learning_rate,
        "best": [best_point.strategy, best_point.budget],
        "best_seconds": best,
        "best_rate": best_rate,
        "excess": chosen / best - 1,
    }


def workloads() -> list[Workload]:
    """The tasks that were looked at while the predictor was made."""
    d10, er16 = families.paper("geometric16-d10"), families.paper("er16")
    d5 = families.paper("geometric16-d5")
    return [
        quadratic("quadratic", d10, dissimilarity=0.0, compute=0.1, link=0.05),
        quadratic("quadratic, slow links", er16, dissimilarity=0.0, compute=0.1, link=0.3),
        quadratic("quadratic, unlike data", d10, dissimilarity=0.5, compute=0.1, link=0.05),
        quadratic("quadratic, sparse", d5, dissimilarity=0.1, compute=0.1, link=0.1),
        logistic("logistic regression", er16, compute=0.1, link=0.05),
        logistic("logistic, slow links", d5, compute=0.05, link=0.2),
    ]


def held_out_workloads() -> list[Workload]:
    """Other graphs and speeds: nothing was adjusted after seeing these."""
    d13, er8 = families.paper("geometric16-d13"), families.paper("er8")
    ring, torus, barbell = map(families.parse, ("ring:12", "torus:4x4", "barbell:12"))
    cube, er20, star = map(families.parse, ("hypercube:4", "erdos-renyi:20:0.25:3", "star:10"))
    geometric, path = map(families.parse, ("geometric:14:0.45:2", "path:8"))
    return [
        quadratic("quadratic, ring", ring, dissimilarity=0.2, compute=0.1, link=0.1),
        quadratic("quadratic, torus", torus, dissimilarity=0.0, compute=0.05, link=0.2),
        quadratic("quadratic, very unlike", d13, dissimilarity=1.0, compute=0.2, link=0.02),
        logistic("logistic, small graph", er8, compute=0.1, link=0.1),
        logistic("logistic, barbell", barbell, compute=0.1, link=0.1),
        quadratic("quadratic, hypercube", cube, dissimilarity=0.1, compute=0.1, link=0.15),
        quadratic("quadratic, random graph", er20, dissimilarity=0.0, compute=0.02, link=0.1),
        quadratic("quadratic, star", star, dissimilarity=0.3, compute=0.1, link=0.05),
        logistic("logistic, geometric", geometric, compute=0.1, link=0.02),
        logistic("logistic, path", path, compute=0.05, link=0.1),
    ]


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['task']:24s} {row['topology']:22s} {row['choice'][0]:>8s} {row['choice'][1]:5.2f} "
        f"{row['predicted_seconds']:9.4g} {row['simulated_seconds']:9.4g} "
        f"{row['best'][0]:>8s} {row['best'][1]:5.2f} {row['best_seconds']:9.4g} "
        f"{100 * row['excess']:6.1f} %{'  held out' if row['held_out'] else ''}"
    )


def verdict(rows: list[dict[str, Any]], held_out: bool) -> str:
    """How many choices of a kind were near the best."""
    excesses = [row["excess"] for row in rows if row["held_out"] == held_out]
    near = sum(excess <= 0.15 for excess in excesses)
    kind = "held-out tasks" if held_out else "tasks at hand while it was made"
    worst = f", largest excess {100 * max(excesses):.1f} %" if excesses else ""
    return f"{kind}: {near} of {len(excesses)} within 15 % of the best{worst}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    tasks = [(workload, False) for workload in workloads()]
    tasks += [(workload, True) for workload in held_out_workloads()]
    rows = []
    for workload, held_out in tasks[: 1 if quick else None]:
        rows.append(verify(workload) | {"held_out": held_out})
        print(line(rows[-1]), flush=True)
    table = "\n".join(
        [
            "matcha.tune's choice against brute force, by simulation; seconds to the target.",
            f"{'task':24s} {'topology':22s} {'choice':>8s} {'C_b':>5s} {'predicted':>9s} "
            f"{'simulated':>9s} {'best':>8s} {'C_b':>5s} {'seconds':>9s} {'excess':>8s}",
            *map(line, rows),
            *(verdict(rows, held_out) for held_out in (False, True)),
        ]
    )
    print(table)
    if not quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "tuning.json").write_text(json.dumps(rows, indent=1) + "\n")
        (RESULTS / "tuning.txt").write_text(table + "\n")


if __name__ == "__main__":
    main()
