"""The problem: what training looks like from afar, and how many iterations its target takes.

The excess loss of the workers' average, after K iterations at learning rate η, has three parts:
what is left of the start, the noise that even averaging all workers leaves (both as in Theorem 2),
and what the average feels of disagreement, by noise and by heterogeneous data. A convex loss of the
average is at most the mean of the workers' losses (Jensen), so what disagreement costs a worker
bounds what it costs the average; `Problem.coupling` says how much of the bound is charged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from matcha.errors import InputError


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
    """ζ²: mean squared distance of workers' expected gradients to their mean; data may differ."""
    coupling: float = 1.0
    """How much of what disagreement costs the workers' own models their average pays: at most all
    of it where the loss is convex, nothing for quadratics that share one curvature."""
    initial_gap: float = 1.0
    """F(x₁) − F*, at the start."""
    target_gap: float = 0.01
    """The wanted F(x̄) − F* of the workers' average x̄."""

    def __post_init__(self) -> None:
        for name in ("smoothness", "initial_gap", "target_gap"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"{name} is {getattr(self, name)!r}, but it must be positive.")
        for name in ("gradient_variance", "dissimilarity", "coupling"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"{name} is {getattr(self, name)!r}, but it is at least 0.")
        for name in ("curvature", "strong_convexity"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= self.smoothness:
                raise InputError(f"{name} is {value!r}, but it lies in (0, smoothness].")
        if self.target_gap >= self.initial_gap:
            raise InputError("the target is no better than the start: lower it.")


def floor(problem: Problem, num_workers: int, rate: float, noise: float, drift: float) -> float:
    """The F(x̄) − F* that a constant learning rate never goes below.

    The average model hovers at ησ²/4m / (1 − ηh/2), a quadratic's exact value (Theorem 2's second
    term is 4L times it for small ηh). Disagreement adds up to half the curvature h times
    η²(σ² · noise + ζ² · drift), in which the pull of the curvature itself, 1 − ηh per iteration,
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
    felt = problem.coupling * rate**2 / 2 * scale * spread
    return (averaged + felt) / len(curvatures)


def fewest_iterations(
    problem: Problem, num_workers: int, noise: float, drift: float
) -> tuple[float, float]:
    """The fewest iterations to the target over learning rates up to 1/L, and that rate."""
    from scipy.optimize import minimize_scalar

    if not (math.isfinite(noise) and math.isfinite(drift)):
        return math.inf, 0.0

    def needed(rate: float) -> float:
        left = problem.target_gap - floor(problem, num_workers, rate, noise, drift)
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
