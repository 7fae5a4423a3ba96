"""The second moment of the workers' disagreement when rounds are random.

A schedule of independent or exclusive coins maps the covariance X to E[W X Wᵀ]; the steady state
of X ← E[W (X + I − J) Wᵀ] is found without forming that m² × m² map.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from matcha._numerics.spectra import laplacian
from matcha.errors import InputError
from matcha.rounds import RoundProcess
from matcha.schedules import Active
from matcha.theory import cycles
from matcha.theory.cycles import Array
from matcha.theory.pairwise import expected_conjugate

Operator: TypeAlias = Callable[[Array], Array]
_TOLERANCE = 1e-10


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
