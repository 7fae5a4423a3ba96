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
from typing import Any, TypeVar

import numpy as np

from matcha._numerics.spectra import laplacian
from matcha.mixing import contraction_factor, laplacian_extremes, moments
from matcha.rounds import EXACT, ONE_WAY, Mixing, Shares
from matcha.schedules import Schedule
from matcha.theory import cycles
from matcha.theory.cycles import Array
from matcha.theory.cyclic_rounds import cycle_contraction, cycle_error, mixing_matrices
from matcha.theory.moments import (
    Operator,
    adds_up,
    coin_laplacian,
    fixed_point_error,
    second_moment,
)
from matcha.theory.parts import Parts
from matcha.topology import Link, Matching

_P = TypeVar("_P", bound=Parts)

MAX_WORKERS = 512
"""Beyond this the exact covariance (m × m, solved for) is too slow to be a default."""


def consensus_error(plan: Parts, *, max_workers: int = MAX_WORKERS) -> float | None:
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
        plan.matchings,
        plan.schedule,
        plan.num_workers,
        mixing=plan.mixing,
        weight=plan.alpha,
        weights=plan.weights,
    )


def schedule_error(
    matchings: Sequence[Matching],
    schedule: Schedule,
    num_workers: int,
    *,
    mixing: Mixing,
    weight: float,
    weights: Shares | None = None,
) -> float:
    """`consensus_error` before there is a plan: for a schedule over matchings."""
    if schedule.period is not None:
        return cycle_error(matchings, schedule.period, num_workers, mixing, weight, weights)
    operator = second_moment(
        matchings, schedule, num_workers, mixing=mixing, weight=weight, weights=weights
    )
    return fixed_point_error(operator, num_workers, symmetric=adds_up(schedule, mixing))


def drift_error(plan: Parts, *, max_workers: int = MAX_WORKERS) -> float | None:
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
    if plan.schedule.period is not None:
        return _cycle_drift(plan, plan.schedule.period, noise)
    symmetric = adds_up(plan.schedule, plan.mixing)
    mean = noise.copy()
    for p, coin in plan.schedule.coins:
        scale = plan.alpha if plan.weights is None else 1.0
        L = p * scale * coin_laplacian(plan.matchings, coin, m, plan.weights).toarray()
        mean = mean - L if symmetric else (np.eye(m) - L) @ mean
    if float(np.abs(np.linalg.eigvals(mean)).max()) > 1 - 1e-12:
        return math.inf
    # C = E[x gᵀ] settles first; then X has the source (I − J) + C + Cᵀ.
    C = np.linalg.solve(np.eye(m) - mean, mean @ noise)
    return fixed_point_error(_operator(plan), m, symmetric=symmetric, noise=noise + C + C.T)


def _cycle_drift(plan: Parts, period: Sequence[tuple[int, ...]], noise: Array) -> float:
    m, length = plan.num_workers, len(period)
    made = mixing_matrices(plan.matchings, period, m, plan.mixing, plan.alpha, plan.weights)
    matrices = [made.get(active) for active in period]

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


def _operator(plan: Parts, *, adjoint: bool = False) -> Operator:
    return second_moment(
        plan.matchings,
        plan.schedule,
        plan.num_workers,
        mixing=plan.mixing,
        weight=plan.alpha,
        weights=plan.weights,
        adjoint=adjoint,
    )


def error_optimal_alpha(plan: Parts) -> float:
    """The α that minimises the steady-state consensus error, for the plan's own schedule.

    ρ is a worst case over directions; the error is an average over them, and its best α is
    usually smaller. For a fair comparison of strategies by consensus error, use this one.
    Weights a link were found together and stay as they are.
    """
    from scipy.optimize import minimize_scalar

    if plan.weights is not None:
        return plan.alpha

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


def with_error_optimal_alpha(plan: _P) -> _P:
    """The same plan with the α that minimises its consensus error; weights a link keep theirs."""
    changed: Any = plan
    if plan.weights is not None:
        return plan
    return replace(changed, alpha=error_optimal_alpha(plan))  # type: ignore[no-any-return]


def contraction(plan: Parts) -> float:
    """ρ = ‖E[WᵀW] − J‖₂ of any plan; over a cycle, ‖Φ − J‖^(2 / cycle length).

    Where the rounds of a cycle are one and the same or empty (the paper's periodic DecenSGD), it
    is ρ of the expected W², not of a whole period.
    """
    schedule, m = plan.schedule, plan.num_workers
    if schedule.period is not None:
        rounds = [active for active in schedule.largest if active]
        if not averages_over_cycle(plan):
            return _shared_contraction(plan, rounds[0])
        return cycle_contraction(
            plan.matchings, schedule.period, m, plan.mixing, plan.alpha, plan.weights
        )
    if plan.mixing == "laplacian" and not schedule.exclusive:
        groups = tuple(coin for _, coin in schedule.coins)
        of = moments(plan.matchings, schedule.probabilities, m, groups, plan.weights)
        return contraction_factor(of, plan.alpha if plan.weights is None else 1.0)
    if schedule.exclusive and plan.weights is None:
        # E[L²] = 2L̄: every direction shrinks by 2w(1 − w) of its share of L̄.
        return 1.0 - 2 * plan.alpha * (1 - plan.alpha) * connectivity(plan)
    second = _operator(plan, adjoint=True)(np.eye(m)) - 1 / m
    return float(np.linalg.norm((second + second.T) / 2, 2))


def averages_over_cycle(plan: Parts) -> bool:
    """Whether a plan's ρ is a mean over its cycle, rather than the norm of one iteration.

    The two do not compare: exact consensus after a cycle makes the mean 0, however much
    disagreement there is on the way. The consensus error compares all plans.
    """
    if plan.schedule.period is None:
        return False
    rounds = [active for active in plan.schedule.largest if active]
    return not (plan.mixing in ("laplacian", *EXACT) and len(rounds) == 1)


def _shared_contraction(plan: Parts, active: tuple[int, ...]) -> float:
    """1 − f + f‖W − J‖² for a round W that comes in a share f of the iterations."""
    share = plan.schedule.probabilities[active[0]]
    if plan.mixing in EXACT:
        return 1.0 - share
    everything = coin_laplacian(plan.matchings, active, plan.num_workers, plan.weights)
    ends = laplacian_extremes(everything, plan.topology)
    scale = plan.alpha if plan.weights is None else 1.0
    worst = max((1.0 - scale * value) ** 2 for value in ends)
    return 1.0 - share + share * worst


def connectivity(plan: Parts) -> float:
    """λ₂ of the expected topology Σ p_j L_j (eq. 5), of any plan."""
    expected: dict[Link, float] = dict.fromkeys(plan.topology.links, 0.0)
    # A message is half an exchange; where links go both ways it counts for the link either way.
    part = 0.5 if plan.mixing in ONE_WAY else 1.0
    for matching, often in zip(plan.matchings, plan.schedule.uses, strict=True):
        for i, j in matching:
            expected[(i, j) if (i, j) in expected else (j, i)] += part * often
    weights = np.array(list(expected.values()))
    if not weights.any():
        return 0.0
    mean = laplacian(plan.topology.link_array, plan.num_workers, weights)
    return laplacian_extremes(mean, plan.topology)[0]
