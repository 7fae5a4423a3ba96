"""The steady state: how far apart workers stay under gradient noise, and how fast they agree.

Convention for the consensus error. Each iteration adds unit gradient noise and then mixes,
X ← E[W (X + I − J) Wᵀ]; the error is tr(X)/m in the steady state, measured after mixing and
averaged over iterations. With learning rate η and gradient noise of variance σ² a worker, the
workers' mean squared distance to their average settles near η²σ² times it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from matcha.plans import Plan
from matcha.rounds import Mixing
from matcha.schedules import Bernoulli, Choice, Cycle, Periodic
from matcha.theory import cycles
from matcha.theory.cycles import Array
from matcha.theory.moments import (
    Operator,
    choice_operator,
    fixed_point_error,
    laplacian_operator,
    pairwise_operator,
)
from matcha.theory.periods import cycle_contraction, cycle_error, periodic_cycle
from matcha.topology import Matching, laplacian

MAX_WORKERS = 512
"""Beyond this the exact covariance (m × m, solved for) is too slow to be a default."""


def consensus_error(plan: Plan, *, max_workers: int = MAX_WORKERS) -> float | None:
    """The steady-state consensus error tr(X)/m of any plan, exactly.

    Independent and one-at-a-time activation: the fixed point of the expected second-moment map.
    Periodic and cyclic schedules: the periodic solution, averaged over a period.

    Args:
        plan: What to analyse; only its matchings, schedule, mixing and weight matter.
        max_workers: Return None for larger plans rather than take minutes.

    Returns:
        The error, infinite where the plan never reaches consensus; None where m is too large.

    >>> import matcha
    >>> plan = matcha.plan(matcha.families.ring(4), budget=1.0, strategy="vanilla")
    >>> round(consensus_error(plan), 5)
    0.09375
    """
    if plan.num_workers > max_workers:
        return None
    return schedule_error(
        plan.matchings, plan.schedule, plan.num_workers, mixing=plan.mixing, weight=plan.alpha
    )


def schedule_error(
    matchings: Sequence[Matching],
    schedule: Bernoulli | Choice | Periodic | Cycle,
    num_workers: int,
    *,
    mixing: Mixing,
    weight: float,
) -> float:
    """`consensus_error` before there is a plan: for a schedule over matchings."""
    if isinstance(schedule, Cycle):
        return cycle_error(matchings, schedule.cycle, num_workers, mixing, weight)
    if isinstance(schedule, Periodic):
        everything = tuple(range(len(matchings)))
        rounds = periodic_cycle(schedule.frequency, everything)
        return cycle_error(matchings, rounds, num_workers, mixing, weight)
    if isinstance(schedule, Choice):
        operator = choice_operator(matchings, schedule, weight)
        return fixed_point_error(operator, num_workers, symmetric=True)
    if all(p in (0.0, 1.0) for p in schedule.probabilities):
        always = tuple(j for j, p in enumerate(schedule.probabilities) if p == 1.0)
        return cycle_error(matchings, (always,), num_workers, mixing, weight)
    if mixing == "laplacian":
        operator = laplacian_operator(matchings, schedule, num_workers, weight)
        return fixed_point_error(operator, num_workers, symmetric=True)
    operator = pairwise_operator(matchings, schedule, weight)
    return fixed_point_error(operator, num_workers, symmetric=False)


def drift_error(plan: Plan, *, max_workers: int = MAX_WORKERS) -> float | None:
    """The steady-state disagreement tr(X)/m that gradients with fixed differences cause.

    Where workers' gradients differ by the same vectors at every iteration (unlike data), noise
    does not average out over time: x ← W(x + g) with g fixed, of covariance I − J over
    directions. With learning rate η and dissimilarity ζ² the workers' mean squared distance to
    their average settles near η²ζ² times it. Theorem 2 bounds it by ρ/(1 − √ρ)².

    Returns:
        The error, infinite where the plan never reaches consensus; None where m is too large.
    """
    m = plan.num_workers
    if m > max_workers:
        return None
    noise = cycles.centering(m)
    schedule = plan.schedule
    if isinstance(schedule, (Bernoulli, Choice)):
        mean = noise.copy()
        for matching, p in zip(plan.matchings, schedule.probabilities, strict=True):
            L = p * plan.alpha * laplacian(matching, m).toarray()
            mean = mean - L if _adds_up(plan) else (np.eye(m) - L) @ mean
        if float(np.abs(np.linalg.eigvals(mean)).max()) > 1 - 1e-12:
            return math.inf
        # C = E[x gᵀ] settles first; then X has the source (I − J) + C + Cᵀ.
        C = np.linalg.solve(np.eye(m) - mean, mean @ noise)
        return fixed_point_error(
            _operator(plan), m, symmetric=_adds_up(plan), noise=noise + C + C.T
        )
    return _cycle_drift(plan, noise)


def _adds_up(plan: Plan) -> bool:
    """Whether E[W] is I minus a sum over matchings, not a product over them."""
    return plan.mixing == "laplacian" or isinstance(plan.schedule, Choice)


def _cycle_drift(plan: Plan, noise: Array) -> float:
    m, length = plan.num_workers, _period(plan)
    matrices = [round_.matrix(m) if round_ else None for round_ in plan.rounds(0, length)]

    def advance(X: Array, C: Array) -> tuple[Array, Array, float]:
        total = 0.0
        for W in matrices:
            X = X + noise + C + C.T
            C = C + noise
            if W is not None:
                X, C = W @ X @ W.T, W @ C
            total += float(np.trace(X))
        return X, C, total

    zero = np.zeros((m, m))
    product = noise
    for W in matrices:
        product = product if W is None else W @ product
    if float(np.linalg.norm(product, 2)) > 1 - 1e-12:
        return math.inf
    C: Array = np.linalg.solve(np.eye(m) - product, advance(zero, zero)[1]).astype(np.float64)
    X = cycles.lyapunov(product, advance(zero, C)[0])
    return math.inf if X is None else advance(X, C)[2] / (length * m)


def _period(plan: Plan) -> int:
    if isinstance(plan.schedule, Cycle):
        return len(plan.schedule.cycle)
    assert isinstance(plan.schedule, Periodic)
    return len(periodic_cycle(plan.schedule.frequency, ()))


def _operator(plan: Plan, *, adjoint: bool = False) -> Operator:
    """X ↦ E[W X Wᵀ] of a plan with random rounds, or its adjoint E[Wᵀ X W]."""
    schedule = plan.schedule
    if isinstance(schedule, Choice):
        return choice_operator(plan.matchings, schedule, plan.alpha)
    assert isinstance(schedule, Bernoulli)
    if plan.mixing == "laplacian":
        return laplacian_operator(plan.matchings, schedule, plan.num_workers, plan.alpha)
    return pairwise_operator(plan.matchings, schedule, plan.alpha, adjoint=adjoint)


def error_optimal_alpha(plan: Plan) -> float:
    """The α that minimises the steady-state consensus error, for the plan's own schedule.

    ρ is a worst case over directions; the error is an average over them, and its best α is
    usually smaller. For a fair comparison of strategies by consensus error, use this one.
    """
    from scipy.optimize import minimize_scalar

    def error(alpha: float) -> float:
        value = schedule_error(
            plan.matchings,
            plan.schedule,
            plan.num_workers,
            mixing=plan.mixing,
            weight=float(alpha),
        )
        return value if math.isfinite(value) else 1e300

    # The error blows up at both ends of the range of α and had one minimum wherever we looked.
    high = min(1.6 * plan.alpha, 1.0) if plan.mixing == "laplacian" else 0.95
    found = minimize_scalar(
        error, bounds=(0.2 * plan.alpha, high), method="bounded", options={"xatol": 1e-5}
    )
    return float(found.x) if error(found.x) <= error(plan.alpha) else plan.alpha


def with_error_optimal_alpha(plan: Plan) -> Plan:
    """The same plan with the α that minimises its consensus error; ρ is recomputed."""
    alpha = error_optimal_alpha(plan)
    changed = replace(plan, alpha=alpha)
    return replace(changed, consensus_error=consensus_error(changed), rho=contraction(changed))


def contraction(plan: Plan) -> float:
    """ρ = ‖E[WᵀW] − J‖₂ of any plan; over a cycle, ‖Φ − J‖^(2 / cycle length)."""
    m, schedule = plan.num_workers, plan.schedule
    if isinstance(schedule, (Cycle, Periodic)):
        rounds = (
            schedule.cycle
            if isinstance(schedule, Cycle)
            else periodic_cycle(schedule.frequency, tuple(range(len(plan.matchings))))
        )
        return cycle_contraction(plan.matchings, rounds, m, plan.mixing, plan.alpha)
    second_moment = _operator(plan, adjoint=True)(np.eye(m)) - 1 / m
    return float(np.linalg.norm((second_moment + second_moment.T) / 2, 2))
