"""Pairwise mixing with independent coins: its exact ρ, and the probabilities that minimise it.

A round applies W = A_r ··· A_2 A_1, where A_j = I − w L_j moves both ends of each link of
matching j towards each other (w = ½: to their mean) and is skipped by a coin with probability
1 − p_j. Conditioning on one coin at a time gives E[WᵀW] exactly: starting from X = I,
X ← (1 − p_j) X + p_j A_j X A_j with the matching applied last coming first; ρ = λ_max(X − J).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from matcha.errors import InputError
from matcha.theory import cycles
from matcha.theory.cycles import Array, Step
from matcha.topology import Matching

MAX_WORKERS = 2048
"""X is a dense matrix; beyond this it takes too long."""

_ITERATIONS = 60
_ORDERED_UP_TO = 128


class PairwiseActivation(NamedTuple):
    """An order of matchings and their probabilities, with the contraction they give."""

    order: tuple[int, ...]
    """Positions of the matchings in the order of exchange."""
    probabilities: tuple[float, ...]
    """In that order."""
    rho: float
    start_rho: float
    """ρ of the probabilities that the search started from, in their own order."""


def expected_conjugate(X: Array, chain: Sequence[tuple[float, Step]], weight: float = 0.5) -> Array:
    """E[W X Wᵀ] for W = A_r ··· A_1 whose factors are (probability, matching) in this order."""
    X = X.copy()
    for p, ends in chain:
        mixed = X.copy()
        cycles.conjugate(mixed, ends, weight)
        X += p * (mixed - X)
    return X


def optimal_activation(
    matchings: Sequence[Matching],
    start: Sequence[float],
    num_workers: int,
    limit: float,
    *,
    costs: Sequence[float] | None = None,
) -> PairwiseActivation:
    """Minimise ρ itself over the order of matchings and their probabilities.

    The order is improved by exchanging two matchings at a time, the probabilities by projected
    gradient steps through the recursion; both accept only what lowers the exact ρ, so the answer
    is never worse than the start, such as the probabilities that maximise λ₂ (eq. 5).
    Σ p_j · cost_j stays within the limit; costs are 1 by default.
    """
    if num_workers > MAX_WORKERS:
        raise InputError(
            f"pairwise mixing is optimised exactly for up to {MAX_WORKERS} workers, "
            f"not {num_workers}: use the greedy strategy, or laplacian mixing."
        )
    steps = [cycles.step(matching) for matching in matchings]
    c = np.ones(len(steps)) if costs is None else np.asarray(costs, dtype=np.float64)
    p = np.asarray(start, dtype=np.float64)
    order = list(range(len(steps)))
    start_rho = rho = _rho(steps, p, order, num_workers)
    turns = 2 if num_workers <= _ORDERED_UP_TO else 1
    for _ in range(turns):
        if num_workers <= _ORDERED_UP_TO:
            order, rho = _improve_order(steps, p, order, rho, num_workers)
        p, rho = _descend(steps, p, order, rho, num_workers, c, limit)
    return PairwiseActivation(
        order=tuple(order),
        probabilities=tuple(float(p[j]) for j in order),
        rho=rho,
        start_rho=start_rho,
    )


def project(p: Array, costs: Array, limit: float) -> Array:
    """The nearest point with 0 <= p <= 1 and Σ p_j · cost_j <= limit.

    >>> project(np.array([0.9, 0.9]), np.ones(2), 1.0).tolist()
    [0.5, 0.5]
    """
    clipped: Array = np.clip(p, 0.0, 1.0)
    if clipped @ costs <= limit:
        return clipped
    low, high = 0.0, float(np.max(p / costs))
    for _ in range(200):
        middle = (low + high) / 2
        if np.clip(p - middle * costs, 0.0, 1.0) @ costs > limit:
            low = middle
        else:
            high = middle
    projected: Array = np.clip(p - high * costs, 0.0, 1.0)
    return np.round(projected, 15)


# -- search -------------------------------------------------------------------------------------


def _top(X: Array) -> tuple[float, Array]:
    """The largest eigenvalue of X − J, and a mixture uuᵀ of the directions that nearly reach it.

    ρ has a kink where eigenvalues meet; the mixture points downhill for all of them at once.
    """
    m = len(X)
    values, vectors = np.linalg.eigh((X + X.T) / 2 - 1 / m)
    rho = max(float(values[-1]), 0.0)
    share = np.exp((values - values[-1]) / max(0.02 * (1 - rho), 1e-9))
    share /= share.sum()
    return rho, (vectors * share) @ vectors.T


def _rho(steps: Sequence[Step], p: Array, order: Sequence[int], m: int) -> float:
    chain = [(float(p[j]), steps[j]) for j in reversed(order)]
    return _top(expected_conjugate(np.eye(m), chain))[0]


def _gradient(steps: Sequence[Step], p: Array, order: Sequence[int], m: int) -> Array:
    """∂ρ/∂p by running the recursion forward and its adjoint back."""
    states = []
    X = np.eye(m)
    for j in reversed(order):
        mixed = X.copy()
        cycles.conjugate(mixed, steps[j], 0.5)
        states.append((j, mixed - X))
        X = X + p[j] * (mixed - X)
    _, U = _top(X)
    gradient = np.zeros(len(steps))
    for j, change in reversed(states):
        gradient[j] = float(np.sum(U * change))
        U = expected_conjugate(U, [(float(p[j]), steps[j])])
    return gradient


def _descend(
    steps: Sequence[Step],
    p: Array,
    order: Sequence[int],
    rho: float,
    m: int,
    costs: Array,
    limit: float,
) -> tuple[Array, float]:
    size = 0.1
    for _ in range(_ITERATIONS if m <= 256 else 8):
        gradient = _gradient(steps, p, order, m)
        length = float(np.linalg.norm(gradient))
        if length == 0:
            break
        while size > 1e-5:
            candidate = project(p - size * gradient / length, costs, limit)
            found = _rho(steps, candidate, order, m)
            if found < rho - 1e-12:
                p, rho = candidate, found
                size *= 1.5
                break
            size /= 2
        else:
            break
    return p, rho


def _improve_order(
    steps: Sequence[Step], p: Array, order: list[int], rho: float, m: int
) -> tuple[list[int], float]:
    """Exchange two matchings while that lowers ρ: one pass over all pairs (neighbours if many)."""
    n = len(order)
    pairs = combinations(range(n), 2) if n <= 16 else ((a, a + 1) for a in range(n - 1))
    for a, b in pairs:
        other = order.copy()
        other[a], other[b] = other[b], other[a]
        found = _rho(steps, p, other, m)
        if found < rho - 1e-12:
            order, rho = other, found
    return order, rho
