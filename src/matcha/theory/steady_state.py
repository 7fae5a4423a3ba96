"""The steady state: how far apart workers stay under gradient noise, and how fast they agree.

Convention for the consensus error. Each iteration adds unit gradient noise and then mixes,
X ← E[W (X + I − J) Wᵀ]; the error is tr(X)/m in the steady state, measured after mixing and
averaged over iterations. With learning rate η and gradient noise of variance σ² per worker, the
workers' mean squared distance to their average settles near η²σ² times it.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from matcha._numerics.spectra import laplacian
from matcha.mixing import contraction_factor, laplacian_extremes, moments
from matcha.rounds import RoundProcess
from matcha.schedules import Active
from matcha.theory import cycles
from matcha.theory.cycles import Array
from matcha.theory.cyclic_rounds import (
    cycle_contraction,
    cycle_error,
    mixing_matrices,
    period_of,
)
from matcha.theory.moments import adds_up, coin_laplacian, fixed_point_error, second_moment
from matcha.topology import Link

MAX_WORKERS = 512
"""Beyond this the exact covariance (m × m, solved for) is too slow to be a default."""


def consensus_error(process: RoundProcess, *, max_workers: int = MAX_WORKERS) -> float | None:
    """The steady-state consensus error tr(X)/m of any rounds, exactly.

    Rounds that are drawn: the fixed point of the expected second-moment map. Rounds that repeat:
    the periodic solution, averaged over a period.

    Args:
        process: The rounds to analyse.
        max_workers: Return None for more workers rather than take minutes.

    Returns:
        The error, infinite where consensus is never reached; None where m is too large.

    >>> import matcha
    >>> plan = matcha.plan(matcha.families.ring(4), budget=1.0, strategy="vanilla")
    >>> round(consensus_error(plan.process), 5)
    0.09375
    """
    if process.num_workers > max_workers and "consensus_error" not in process.figures:
        return None
    return process.figure("consensus_error", _consensus_error)


def _consensus_error(process: RoundProcess) -> float:
    if process.schedule.period is not None:
        return cycle_error(process)
    operator = second_moment(process)
    return fixed_point_error(operator, process.num_workers, symmetric=adds_up(process))


def drift_error(process: RoundProcess, *, max_workers: int = MAX_WORKERS) -> float | None:
    """The steady-state disagreement tr(X)/m that gradients with fixed differences cause.

    Where workers' gradients differ by the same vectors at every iteration (heterogeneous data),
    noise does not average out over time: x ← W(x + g) with g fixed, of covariance I − J over
    directions. With learning rate η and dissimilarity ζ² the workers' mean squared distance to
    their average settles near η²ζ² times it. Theorem 2 bounds it by ρ/(1 − √ρ)².

    Returns:
        The error, infinite where consensus is never reached; None where m is too large.
    """
    m = process.num_workers
    if m > max_workers:
        return None
    noise = cycles.centering(m)
    if process.schedule.period is not None:
        return _cycle_drift(process, noise)
    symmetric = adds_up(process)
    mean = noise.copy()
    for p, coin in process.schedule.coins:
        L = p * process.link_scale * coin_laplacian(process, coin).toarray()
        mean = mean - L if symmetric else (np.eye(m) - L) @ mean
    if float(np.abs(np.linalg.eigvals(mean)).max()) > 1 - 1e-12:
        return math.inf
    # C = E[x gᵀ] settles first; then X has the source (I − J) + C + Cᵀ.
    C = np.linalg.solve(np.eye(m) - mean, mean @ noise)
    source = noise + C + C.T
    return fixed_point_error(second_moment(process), m, symmetric=symmetric, noise=source)


def _cycle_drift(process: RoundProcess, noise: Array) -> float:
    m, period = process.num_workers, period_of(process)
    made = mixing_matrices(process)
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
    return math.inf if X is None else advance(X, C)[2] / (len(period) * m)


def error_optimal_alpha(process: RoundProcess) -> float:
    """The α that minimises the steady-state consensus error of the same rounds.

    ρ is a worst case over directions; the error is an average over them, and its best α is
    usually smaller. For a fair comparison of strategies by consensus error, use this one.
    Weights per link were found together and stay as they are.
    """
    from scipy.optimize import minimize_scalar

    if process.weights is not None:
        return process.alpha

    def error(alpha: float) -> float:
        value = _consensus_error(replace(process, alpha=float(alpha)))
        return value if math.isfinite(value) else 1e300

    # The error blows up at both ends of the range of α and had one minimum wherever we looked.
    high = min(1.6 * process.alpha, 1.0) if process.mixing == "laplacian" else 0.95
    found = minimize_scalar(
        error, bounds=(0.2 * process.alpha, high), method="bounded", options={"xatol": 1e-5}
    )
    better = error(found.x) <= error(process.alpha)
    return float(found.x) if better else process.alpha


def contraction(process: RoundProcess) -> float:
    """ρ = ‖E[WᵀW] − J‖₂ of any rounds; over a cycle, ‖Φ − J‖^(2 / cycle length).

    Where the rounds of a cycle are one and the same or empty (the paper's periodic DecenSGD), it
    is ρ of the expected W², not of a whole period.
    """
    return process.figure("rho", _contraction)


def _contraction(process: RoundProcess) -> float:
    schedule, m = process.schedule, process.num_workers
    if schedule.period is not None:
        if averages_over_cycle(process):
            return cycle_contraction(process)
        return _shared_contraction(process, next(active for active in schedule.largest if active))
    if process.mixing == "laplacian" and not schedule.exclusive:
        groups = tuple(coin for _, coin in schedule.coins)
        of = moments(process.matchings, schedule.probabilities, m, groups, process.weights)
        return contraction_factor(of, process.link_scale)
    if schedule.exclusive and process.weights is None:
        # E[L²] = 2L̄: every direction shrinks by 2w(1 − w) of its share of L̄.
        return 1.0 - 2 * process.alpha * (1 - process.alpha) * _connectivity(process)
    second = second_moment(process, adjoint=True)(np.eye(m)) - 1 / m
    return float(np.linalg.norm((second + second.T) / 2, 2))


def averages_over_cycle(process: RoundProcess) -> bool:
    """Whether ρ is a mean over a cycle, rather than the norm of one iteration.

    The two do not compare: exact consensus after a cycle makes the mean 0, however much
    disagreement there is on the way. The consensus error compares all plans.
    """
    if process.schedule.period is None:
        return False
    active = [some for some in process.schedule.largest if some]
    return not ((process.mixing == "laplacian" or process.is_exact) and len(active) == 1)


def _shared_contraction(process: RoundProcess, active: Active) -> float:
    """1 − f + f‖W − J‖² for a round W that comes in a share f of the iterations."""
    share = process.schedule.probabilities[active[0]]
    if process.is_exact:
        return 1.0 - share
    ends = laplacian_extremes(coin_laplacian(process, active), process.topology)
    worst = max((1.0 - process.link_scale * value) ** 2 for value in ends)
    return 1.0 - share + share * worst


def connectivity(process: RoundProcess) -> float:
    """λ₂ of the expected topology Σ p_j L_j (eq. 5), of any rounds."""
    return process.figure("connectivity", _connectivity)


def _connectivity(process: RoundProcess) -> float:
    topology = process.topology
    expected: dict[Link, float] = dict.fromkeys(topology.links, 0.0)
    # A message is half an exchange; where links go both ways it counts for the link either way.
    part = 0.5 if process.is_one_way else 1.0
    for matching, often in zip(process.matchings, process.schedule.uses, strict=True):
        for i, j in matching:
            expected[(i, j) if (i, j) in expected else (j, i)] += part * often
    weights = np.array(list(expected.values()))
    if not weights.any():
        return 0.0
    mean = laplacian(topology.link_array, process.num_workers, weights)
    return laplacian_extremes(mean, topology)[0]
