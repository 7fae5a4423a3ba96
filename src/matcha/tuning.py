"""Tuning: which strategy and budget reach a target soonest.

The error of workers' own models, after K iterations at learning rate η, has four parts: what is
left of the start, the noise that even averaging all workers leaves (both as in Theorem 2), the
disagreement that noise sustains, and the one that unlike data sustains. The last two are exact
here (`theory.consensus_error` and `theory.drift_error`) where Theorem 2 has bounds in ρ. With the
delay model that makes a predicted time to the target for every plan, at its own best rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from matcha.errors import InputError
from matcha.plans import Plan
from matcha.strategies import Effort, look_of, strategy_named
from matcha.strategies import plan as make_plan
from matcha.theory import admissible_learning_rate, consensus_error, drift_error
from matcha.topology import Topology

DEFAULT_BUDGETS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
DEFAULT_STRATEGIES = ("greedy", "matcha", "vanilla")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a training task looks like from afar; relative sizes are all that matters."""

    smoothness: float = 1.0
    """L: the largest curvature of the loss."""
    curvature: float | None = None
    """The mean curvature, for the loss that disagreement causes; None: as spread from μ to L."""
    strong_convexity: float | None = None
    """μ: the smallest curvature; None for losses that are not strongly convex."""
    gradient_variance: float = 1.0
    """σ²: of a worker's stochastic gradient, summed over parameters."""
    dissimilarity: float = 0.0
    """ζ²: mean squared distance of workers' expected gradients to their mean (unlike data)."""
    initial_gap: float = 1.0
    """F(x₁) − F*, at the start."""
    target: float = 0.01
    """The wanted mean of F(x_i) − F* over workers."""

    def __post_init__(self) -> None:
        for name in ("smoothness", "initial_gap", "target"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} is {getattr(self, name)!r}, but it must be positive.")
        for name in ("gradient_variance", "dissimilarity"):
            if not getattr(self, name) >= 0:
                raise InputError(f"{name} is {getattr(self, name)!r}, but it is at least 0.")
        for name in ("curvature", "strong_convexity"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= self.smoothness:
                raise InputError(f"{name} is {value!r}, but it lies in (0, smoothness].")
        if self.target >= self.initial_gap:
            raise InputError("the target is no better than the start: lower it.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedPoint:
    """One plan and when it is predicted to reach the target."""

    strategy: str
    budget: float
    rho: float
    consensus_error: float
    drift_error: float
    comm_seconds: float
    """An iteration's communication."""
    iteration_seconds: float
    learning_rate: float
    """The rate at which the target is reached soonest."""
    iterations: float
    seconds: float
    """Predicted time to the target; infinite where no rate reaches it."""
    proved: bool
    """Whether the rate is within what Theorem 2 allows for this ρ."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """All points, the best of them, and its plan."""

    topology: Topology
    problem: Problem
    compute_time: float
    overlap: bool
    points: tuple[TunedPoint, ...]
    best: TunedPoint
    plan: Plan = field(repr=False)

    def reasons(self) -> tuple[str, ...]:
        """Why the best point is the best, in sentences."""
        best = self.best
        richer = [p for p in self.points if p.strategy == best.strategy and p.budget > best.budget]
        poorer = [p for p in self.points if p.strategy == best.strategy and p.budget < best.budget]
        lines = [
            f"{best.strategy} at budget {best.budget:g} reaches the target after about "
            f"{best.iterations:.0f} iterations of {best.iteration_seconds:.4g} s: "
            f"{best.seconds:.4g} s in all, at learning rate {best.learning_rate:.4g}."
        ]
        if richer:
            p = richer[0]
            lines.append(
                f"More communication (budget {p.budget:g}) saves "
                f"{100 * (1 - p.iterations / best.iterations):.0f} % of the iterations, but each "
                f"takes {100 * (p.iteration_seconds / best.iteration_seconds - 1):.0f} % longer."
            )
        if poorer:
            p = poorer[-1]
            lines.append(
                f"Less communication (budget {p.budget:g}) makes iterations "
                f"{100 * (1 - p.iteration_seconds / best.iteration_seconds):.0f} % shorter, but "
                + (
                    f"needs {100 * (p.iterations / best.iterations - 1):.0f} % more of them."
                    if math.isfinite(p.iterations)
                    else "never reaches the target."
                )
            )
        if not best.proved:
            lines.append(
                "The learning rate is above what Theorem 2 allows for this rho; its bound is a "
                "worst case, and the prediction here is of the average."
            )
        return tuple(lines)

    def table(self) -> str:
        """The points as text, the best one marked."""
        head = (
            f"  {'strategy':9s} {'budget':>6s} {'error':>9s} {'rho':>7s} {'s/iter':>9s} "
            f"{'rate':>9s} {'iterations':>10s} {'seconds':>10s}"
        )
        lines = [head]
        lines += [
            f"{'*' if p == self.best else ' '} {p.strategy:9s} {p.budget:6.3g} "
            f"{p.consensus_error:9.4g} {p.rho:7.4f} {p.iteration_seconds:9.4g} "
            f"{p.learning_rate:9.3g} {p.iterations:10.0f} {p.seconds:10.4g}"
            for p in self.points
        ]
        return "\n".join([*lines, *self.reasons()])

    def to_json(self) -> dict[str, Any]:
        """The tuning as plain JSON values; infinities become null."""

        def plain(point: TunedPoint) -> dict[str, Any]:
            return {
                name: None if isinstance(value, float) and not math.isfinite(value) else value
                for name, value in asdict(point).items()
            }

        return {
            "topology": self.topology.name,
            "compute_time": self.compute_time,
            "overlap": self.overlap,
            "problem": asdict(self.problem),
            "best": plain(self.best),
            "reasons": list(self.reasons()),
            "points": [plain(point) for point in self.points],
        }

    def plot(self, path: str | Path) -> None:
        """Draw time an iteration against consensus error, curves of equal time, the best marked."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 4.4), layout="constrained")
        axis = figure.add_subplot()
        for strategy in dict.fromkeys(point.strategy for point in self.points):
            mine = [p for p in self.points if p.strategy == strategy and p.consensus_error > 0]
            axis.plot(
                [p.iteration_seconds for p in mine],
                [p.consensus_error for p in mine],
                color=look_of(strategy)[0],
                marker=look_of(strategy)[1],
                markersize=4,
                label=strategy,
            )
            for p in mine:
                axis.annotate(
                    f"{p.seconds:.3g} s" if math.isfinite(p.seconds) else "never",
                    (p.iteration_seconds, p.consensus_error),
                    textcoords="offset points",
                    xytext=(5, 4),
                    fontsize=7,
                )
        axis.plot(
            [self.best.iteration_seconds],
            [self.best.consensus_error],
            "*",
            markersize=16,
            color="black",
            label=f"best: {self.best.strategy}, budget {self.best.budget:g}",
        )
        axis.set_yscale("log")
        axis.set_xlabel("time an iteration (s)")
        axis.set_ylabel("steady-state consensus error")
        axis.set_title(f"{self.topology.name}: predicted time to the target")
        axis.legend()
        figure.savefig(path)


def tune(
    topology: Topology,
    *,
    compute_time: float,
    link_time: float | None = None,
    problem: Problem | None = None,
    strategies: Sequence[str] = DEFAULT_STRATEGIES,
    budgets: Sequence[float] = DEFAULT_BUDGETS,
    overlap: bool = False,
    seed: int = 0,
    effort: Effort = "default",
    progress: Callable[[int, int], None] | None = None,
) -> Tuning:
    """Choose the strategy and budget that are predicted to reach a target soonest.

    Args:
        topology: The workers and their links, with link times where they are known.
        compute_time: Seconds that a worker computes in an iteration.
        link_time: Seconds of one matching; may be left out where the topology has link times.
        problem: What training looks like; by default a smooth loss of unit noise.
        strategies: Names as for `matcha.plan`.
        budgets: Values of C_b to try.
        overlap: Whether the exchange runs while the gradient is computed.
        seed: As for `matcha.plan`.
        effort: As for `matcha.plan`.
        progress: Called with (plans made, plans in all) after each.

    Returns:
        Every point with its predicted time, the best one, and its plan.

    Raises:
        InputError: A time is not positive, link times are missing, or nothing reaches the target.

    >>> from matcha.topology import families
    >>> found = tune(families.ring(8), compute_time=1.0, link_time=0.001,
    ...     strategies=["vanilla", "periodic"], budgets=[0.1, 0.5])
    >>> found.best.strategy, found.best.budget
    ('vanilla', 1.0)
    """
    problem = problem or Problem()
    if not compute_time > 0:
        raise InputError(f"the compute time is {compute_time!r}, but it is positive seconds.")
    if topology.link_times is None and link_time is None:
        raise InputError("the topology has no link times: give link_time, seconds of a matching.")
    if topology.link_times is not None and link_time is not None:
        raise InputError("the topology has its own link times: leave link_time out.")
    if link_time is not None and not link_time > 0:
        raise InputError(f"the link time is {link_time!r}, but it is positive seconds.")
    wanted = [
        (strategy, budget)
        for strategy in dict.fromkeys(strategies)
        for budget in strategy_named(strategy).budgets(budgets)
    ]
    points: list[TunedPoint] = []
    plans: list[Plan] = []
    for strategy, budget in wanted:
        plan = make_plan(topology, budget, strategy, seed, effort=effort)
        seconds = plan.expected_comm_time * (1.0 if link_time is None else link_time)
        points.append(predict(plan, problem, compute_time, seconds, overlap=overlap))
        plans.append(plan)
        if progress is not None:
            progress(len(points), len(wanted))
    place = min(range(len(points)), key=lambda n: points[n].seconds)
    if not math.isfinite(points[place].seconds):
        raise InputError(
            "no strategy reaches the target at any learning rate: raise the target or the budgets."
        )
    note = f"tuned: predicted to reach the target in {points[place].seconds:.4g} s."
    return Tuning(
        topology=topology,
        problem=problem,
        compute_time=compute_time,
        overlap=overlap,
        points=tuple(points),
        best=points[place],
        plan=replace(plans[place], notes=(*plans[place].notes, note)),
    )


def predict(
    plan: Plan, problem: Problem, compute_time: float, comm_seconds: float, *, overlap: bool = False
) -> TunedPoint:
    """When a plan is predicted to reach a problem's target, at the best learning rate for it."""
    noise = consensus_error(plan)
    if noise is None:
        # Too large for the exact error: the plan's own estimate, or Theorem 2's bound.
        noise = plan.consensus_error
        noise = plan.rho / (1 - plan.rho) if noise is None else noise
    drift = drift_error(plan) if problem.dissimilarity > 0 else 0.0
    if drift is None:
        drift = plan.rho / (1 - math.sqrt(plan.rho)) ** 2
    iterations, rate = _iterations(problem, plan.num_workers, noise, drift)
    each = max(compute_time, comm_seconds) if overlap else compute_time + comm_seconds
    return TunedPoint(
        strategy=plan.strategy,
        budget=plan.budget,
        rho=plan.rho,
        consensus_error=noise,
        drift_error=drift,
        comm_seconds=comm_seconds,
        iteration_seconds=each,
        learning_rate=rate,
        iterations=iterations,
        seconds=iterations * each,
        proved=rate <= admissible_learning_rate(min(plan.rho, 1 - 1e-12), problem.smoothness),
    )


def floor(problem: Problem, num_workers: int, rate: float, noise: float, drift: float) -> float:
    """The mean of F(x_i) − F* that a constant learning rate never goes below.

    The average model hovers at ησ²/4m / (1 − ηh/2), a quadratic's exact value (Theorem 2's second
    term is 4L times it for small ηh). Disagreement adds half the curvature h times
    η²(σ² · noise + ζ² · drift), in which the pull of the curvature itself, 1 − ηh an iteration,
    helps the mixing: it is taken into the one contraction γ that would give the same noise
    γ²/(1 − γ²), or the same drift γ²/(1 − γ)².
    """
    by_noise, by_drift = math.sqrt(noise / (1 + noise)), math.sqrt(drift) / (1 + math.sqrt(drift))
    curvatures = _curvatures(problem)
    averaged = spread = 0.0
    for h in curvatures:
        averaged += rate * problem.gradient_variance / (4 * num_workers) / (1 - rate * h / 2)
        a, b = by_noise * (1 - rate * h), by_drift * (1 - rate * h)
        spread += h * problem.gradient_variance * a * a / (1 - a * a)
        spread += h * problem.dissimilarity * (b / (1 - b)) ** 2
    mean = sum(curvatures) / len(curvatures)
    scale = 1.0 if problem.curvature is None else problem.curvature / mean
    return (averaged + rate**2 / 2 * scale * spread) / len(curvatures)


def _curvatures(problem: Problem) -> list[float]:
    """Curvatures spread evenly over the orders of magnitude from μ (or L/100) to L."""
    low = problem.strong_convexity or problem.smoothness / 100
    return [low * (problem.smoothness / low) ** ((k + 0.5) / 8) for k in range(8)]


def _progress(share: float, problem: Problem) -> float:
    """The ηK after which a share of the initial gap is left.

    Curvatures spread evenly over the orders of magnitude from μ to L, all directions equally far
    from their optimum, leave (e^{-2μt} − e^{-2Lt}) / (2t(L − μ)) of it at t = ηK: at first like
    Theorem 2's 1/(ηK), in the end exponentially.
    """
    if share >= 1:
        return 0.0
    mu, L = problem.strong_convexity or 0.0, problem.smoothness

    def left(t: float) -> float:
        if L - mu < 1e-9 * L:
            return math.exp(-2 * L * t)
        return (math.exp(-2 * mu * t) - math.exp(-2 * L * t)) / (2 * t * (L - mu))

    low, high = 1e-12 / L, 1 / L
    while left(high) > share:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if left(middle) > share else (low, middle)
    return high


def _iterations(problem: Problem, m: int, noise: float, drift: float) -> tuple[float, float]:
    """The fewest iterations to the target over learning rates up to 1/L, and that rate."""
    from scipy.optimize import minimize_scalar

    if not (math.isfinite(noise) and math.isfinite(drift)):
        return math.inf, 0.0

    def needed(rate: float) -> float:
        left = problem.target - floor(problem, m, rate, noise, drift)
        if left <= 0:
            return math.inf
        return _progress(left / problem.initial_gap, problem) / rate

    def objective(logarithm: float) -> float:
        value = needed(math.exp(logarithm))
        return math.log(value) if math.isfinite(value) else 1e3 + logarithm

    high = math.log(1 / problem.smoothness)
    found = minimize_scalar(
        objective, bounds=(high - 16, high), method="bounded", options={"xatol": 1e-4}
    )
    rates = (math.exp(found.x), math.exp(high))
    best = min(rates, key=needed)
    return needed(best), best
