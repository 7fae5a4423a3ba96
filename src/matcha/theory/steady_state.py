"""The steady state: how far apart workers stay under gradient noise, and how fast they agree.

Convention for the consensus error. Each iteration adds unit gradient noise and then mixes,
X ← E[W (X + I − J) Wᵀ]; the error is tr(X)/m in the steady state, measured after mixing and
averaged over iterations. With learning rate η and gradient noise of variance σ² per worker, the
workers' mean squared distance to their average settles near η²σ² times it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from matcha._numerics.spectra import laplacian
from matcha.errors import InputError
from matcha.mixing import contraction_factor, laplacian_extremes, moments
from matcha.rounds import RoundProcess
from matcha.schedules import Active
from matcha.theory import cycles
from matcha.theory.cycles import Array
from matcha.theory.cyclic_rounds import cycle_contraction, cycle_drift, cycle_error
from matcha.theory.pairwise import expected_conjugate
from matcha.topology import Link

Operator: TypeAlias = Callable[[Array], Array]
_TOLERANCE = 1e-10
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


def drift_error(process: RoundProcess) -> float | None:
    """The steady-state disagreement tr(X)/m that gradients with fixed differences cause.

    Where workers' gradients differ by the same vectors at every iteration (heterogeneous data),
    noise does not average out over time: x ← W(x + g) with g fixed, of covariance I − J over
    directions. With learning rate η and dissimilarity ζ² the workers' mean squared distance to
    their average settles near η²ζ² times it. Theorem 2 bounds it by ρ/(1 − √ρ)².

    Returns:
        The error, infinite where consensus is never reached; None where m is too large.
    """
    m = process.num_workers
    if m > MAX_WORKERS:
        return None
    noise = cycles.centering(m)
    if process.schedule.period is not None:
        return cycle_drift(process)
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
    return process.figure("algebraic_connectivity", _connectivity)


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


# -- rounds that are drawn: the second moment of disagreement -------------------------------------
# A schedule of coins maps the covariance X to E[W X Wᵀ]; the fixed point of X ← E[W (X + I − J)Wᵀ]
# is found without forming that m² × m² map.


def second_moment(process: RoundProcess, *, adjoint: bool = False) -> Operator:
    """X ↦ E[W X Wᵀ] of rounds that are drawn, or its adjoint E[Wᵀ X W]."""
    if process.schedule.exclusive:
        return _exclusive(process)
    if process.mixing == "laplacian":
        return _laplacian(process)
    return _pairwise(process, adjoint=adjoint)


def adds_up(process: RoundProcess) -> bool:
    """Whether E[W] is I minus a sum over matchings, not a product over them; then W = Wᵀ."""
    return process.mixing == "laplacian" or process.schedule.exclusive


def coin_laplacian(process: RoundProcess, coin: Active) -> Any:
    """The Laplacian of what a coin activates; each link by its weight where it has one."""
    links = [link for j in coin for link in process.matchings[j]]
    shares = process.weights
    weights = None if shares is None else [w for j in coin for w in shares[j]]
    return laplacian(links, process.num_workers, weights)


def _laplacian(process: RoundProcess) -> Operator:
    """W = I − α Σ b_c L_c: mean part plus α² Σ p(1 − p) L_c X L_c."""
    parts = []
    mean, alpha = np.eye(process.num_workers), process.link_scale
    for p, coin in process.schedule.coins:
        L = coin_laplacian(process, coin)
        mean -= alpha * p * L.toarray()
        if 0 < p < 1:
            parts.append((alpha * alpha * p * (1 - p), L))

    def apply(X: Array) -> Array:
        result = mean @ X @ mean
        for scale, L in parts:
            result += scale * (L @ (L @ X).T)
        return result

    return apply


def _pairwise(process: RoundProcess, *, adjoint: bool) -> Operator:
    """W = A_r ··· A_1, one matching at a time."""
    matchings, coins = process.matchings, process.schedule.coins
    if any(len(coin) > 1 for _, coin in coins):
        raise InputError("pairwise mixing needs a coin for each matching, not one for a group.")
    chain = [(p, cycles.step(matchings[j])) for p, (j,) in coins if p > 0 and matchings[j]]
    if adjoint:
        chain.reverse()
    return lambda X: expected_conjugate(X, chain, process.alpha)


def _exclusive(process: RoundProcess) -> Operator:
    """X ↦ (1 − Σ p_j) X + Σ p_j W_j X W_j; a single matching mixes alike under both rules."""
    matchings = process.matchings
    shares = process.weights or (None,) * len(matchings)
    steps = [
        (p, cycles.step(matchings[j], shares[j]))
        for p, (j,) in process.schedule.coins
        if p > 0 and matchings[j]
    ]

    def apply(X: Array) -> Array:
        result: Array = X.copy()
        for p, ends in steps:
            mixed = X.copy()
            cycles.conjugate(mixed, ends, process.alpha)
            result += p * (mixed - X)
        return result

    return apply


def fixed_point_error(
    operator: Operator, m: int, *, symmetric: bool, noise: Array | None = None
) -> float:
    """tr(X)/m for X = K(X + I − J), solving (I − K) X = K(I − J) without forming K."""
    from scipy.sparse.linalg import LinearOperator, cg, gmres

    centering = cycles.centering(m)
    source = operator(centering if noise is None else noise)

    def residual(x: Array) -> Array:
        # J is a fixed direction of K; projecting it out keeps the operator definite.
        X: Array = x.reshape(m, m)
        left: Array = X - operator(centering @ X @ centering)
        return left.reshape(m * m)

    system = LinearOperator((m * m, m * m), matvec=residual, dtype=np.float64)
    if symmetric:
        # Warm start: K(I − J) summed as if K were the scalar that its trace suggests.
        shrink = float(np.trace(source)) / (m - 1)
        guess = source / max(1 - shrink, 1e-6) if shrink < 1 else source
        x, failed = cg(system, source.ravel(), x0=guess.ravel(), rtol=_TOLERANCE, maxiter=5000)
    else:
        x, failed = gmres(system, source.ravel(), rtol=_TOLERANCE, restart=60, maxiter=100)
    X = x.reshape(m, m)
    # A steady state is positive semidefinite: no other solution of the equation is one.
    diverges = failed or float(np.linalg.eigvalsh((X + X.T) / 2)[0]) < -1e-6 * abs(np.trace(X))
    return math.inf if diverges else float(np.trace(X)) / m
