"""Step 2: how often to use each matching so that the expected graph is best connected (eq. 5).

    maximise λ₂(Σ_j p_j L_j)   subject to   Σ_j c_j p_j ≤ limit,   0 ≤ p ≤ 1

is a semidefinite program of the order of the graph. λ₂ is the least of xᵀL(p)x over unit vectors
x ⊥ 1, so testing only the x in a subspace V gives an upper bound, by a semidefinite program of the
order of V. We keep the eigenvectors near λ₂ of the points tried so far as V, solve that small
program, and add the eigenvectors of its solution until bound and value meet: a spectral bundle
method (Helmberg and Rendl, 2000). The dual of the small program is the certificate: for any Y ⪰ 0
of unit trace, λ₂(L(p)) ≤ ⟨Y, L(p)⟩ = Σ_j p_j ⟨Y, L_j⟩ for every p, and the right side is largest
where a fractional knapsack says.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from matcha._numerics import Certificate, ProgressCallback, on_one_thread
from matcha._numerics.semidefinite import solve, solve_factored
from matcha._numerics.spectra import (
    DENSE_LIMIT,
    Array,
    dense_eigenpairs,
    is_narrow,
    laplacian,
    lowest_eigenpairs,
    orthonormal,
    perpendicular_basis,
    start_vector,
)
from matcha.errors import InputError
from matcha.topology import Matching

_MAX_ITERATIONS = 100
_DIRECTIONS = 6
_PATIENCE = 12
"""Iterations in which the gap should at least halve."""
_WHOLE_BASIS, _WHOLE_LIMIT = 24, 400
"""Workers up to which all directions are used from the start, or where a few will not do."""
_MULTIPLICITY_LIMIT = 1500
_GATHERED = 4_000_000
"""Numbers, one per link and direction, that may be gathered at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Activation:
    """Activation probabilities, one per matching, and their certificate."""

    probabilities: tuple[float, ...]
    certificate: Certificate


@on_one_thread
def optimal_probabilities(
    matchings: Sequence[Matching],
    num_workers: int,
    limit: float,
    *,
    costs: Sequence[float] | None = None,
    groups: Sequence[Sequence[int]] = (),
    tolerance: float | None = None,
    seed: int = 0,
    progress: ProgressCallback | None = None,
) -> Activation:
    """The activation probabilities of eq. 5: the best connected expected graph within a limit.

    Args:
        matchings: A decomposition of a connected topology into M matchings.
        num_workers: m.
        limit: Upper bound of Σ c_j p_j; with unit costs it is C_b·M.
        costs: What matching j costs, c_j > 0; 1 each by default.
        groups: Matchings, by position, that share one coin and so one probability (all those of
            a clique, say); every matching in one group. Without groups each has its own.
        tolerance: Relative gap to stop at; by default 1e-7 for small graphs, rising with size to
            1e-3 above 8,192 workers.
        seed: Decides the start vectors of the eigenvalue iteration, so that a tie between
            equally good answers always falls the same way.
        progress: Called with (done, total, "iterations of eq. 5 at most") after each iteration.

    Returns:
        Probabilities and certificate. When the limit allows every matching all the time, each
        probability is exactly 1.

    Raises:
        InputError: The limit or a cost is not positive.

    >>> ring = [((0, 1), (2, 3)), ((0, 3), (1, 2))]
    >>> [round(p, 6) for p in optimal_probabilities(ring, 4, limit=1.0).probabilities]
    [0.5, 0.5]
    """
    began = time.perf_counter()
    problem = _Problem(matchings, num_workers, limit, costs, groups)
    tolerance = default_tolerance(num_workers) if tolerance is None else tolerance
    m, number = num_workers, len(problem.costs)
    narrow = m > DENSE_LIMIT and is_narrow(problem.links, m)
    start = start_vector(m, seed)
    everything = problem.limit >= problem.costs.sum() * (1.0 - 1e-12)
    p = np.ones(number) if everything else np.full(number, problem.limit / problem.costs.sum())

    # Rows of gains are aggregated dual matrices: cheap, and for symmetric graphs (complete,
    # star, hypercube), where λ₂ belongs to a huge eigenspace, one row is the whole certificate.
    rows = problem.spread_gains()[None]
    bound = knapsack_bound(rows[0], problem.costs, problem.limit)
    best, best_value = p, -np.inf
    V = np.empty((m, 0))
    # An optimal dual has a rank of at most √(2·groups) (Pataki, 1998); keep a few times that.
    most = max(48, 4 * int(np.sqrt(2.0 * number)))
    whole = m <= _WHOLE_BASIS or (
        m <= _WHOLE_LIMIT and 2 * number >= m and len(problem.links) <= 6 * m
    )
    gaps: list[float] = []
    for _ in range(_MAX_ITERATIONS):
        L = laplacian(problem.links, m, p[problem.owner])
        values, vectors = lowest_eigenpairs(L, _DIRECTIONS, narrow=narrow, start=start)
        if values[0] > best_value:
            best, best_value = p, float(values[0])
        if everything:
            bound = best_value
        elif not gaps:
            space = _eigenspace(L, values, vectors)
            rows = np.stack([rows[0], problem.average_gains(space)])
            bound = min(bound, knapsack_bound(rows[1], problem.costs, problem.limit))
        gaps.append(max(0.0, bound / best_value - 1.0))
        if progress is not None:
            progress(len(gaps), _MAX_ITERATIONS, "iterations of eq. 5 at most")
        if gaps[-1] <= tolerance or V.shape[1] == m - 1:
            break
        if len(gaps) > _PATIENCE and gaps[-1] > 0.5 * gaps[-_PATIENCE]:
            if m > _WHOLE_LIMIT:
                break
            whole = True
        # All directions at once are the whole of eq. 5 in one program, and the last.
        V = perpendicular_basis(m) if whole else orthonormal(np.hstack([V, vectors]))
        whole = V.shape[1] == m - 1
        # Digits far below the current gap would be thrown away with the next directions.
        accuracy = 0.1 * tolerance if whole else max(0.1 * tolerance, 0.01 * gaps[-1])
        p, Y, gains = problem.solve_reduced(V, rows, accuracy)
        p = problem.scale_to_limit(p)
        bound = min(bound, knapsack_bound(gains, problem.costs, problem.limit))
        if not whole and V.shape[1] > most:
            V, rows = _shrink(V, Y, most // 2), np.vstack([rows[:2], gains])
    certificate = Certificate(
        value=best_value,
        bound=max(bound, best_value),
        gap=gaps[-1],
        iterations=len(gaps),
        seconds=time.perf_counter() - began,
    )
    chosen = tuple(best[problem.group_of_matching].tolist())
    return Activation(probabilities=chosen, certificate=certificate)


def default_tolerance(num_workers: int) -> float:
    """The relative gap at which more digits stop being worth their time.

    >>> default_tolerance(16), default_tolerance(1024), default_tolerance(16384)
    (1e-07, 1e-05, 0.001)
    """
    for limit, tolerance in ((128, 1e-7), (512, 1e-6), (2048, 1e-5), (8192, 1e-4)):
        if num_workers <= limit:
            return tolerance
    return 1e-3


def knapsack_bound(gains: Array, costs: Array, limit: float) -> float:
    """The largest Σ g_j p_j with 0 ≤ p ≤ 1 and Σ c_j p_j ≤ limit: best gain per cost first.

    >>> knapsack_bound(np.array([3.0, 1.0, 2.0]), np.ones(3), 1.5)
    4.0
    """
    order = np.argsort(-gains / costs, kind="stable")
    spent_before = np.concatenate([[0.0], np.cumsum(costs[order])[:-1]])
    p = np.clip((limit - spent_before) / costs[order], 0.0, 1.0)
    return float(np.maximum(gains[order], 0.0) @ p)


class _Problem:
    """Eq. 5 as arrays: links sorted by the group whose coin they share."""

    def __init__(
        self,
        matchings: Sequence[Matching],
        num_workers: int,
        limit: float,
        costs: Sequence[float] | None,
        groups: Sequence[Sequence[int]],
    ) -> None:
        coins = groups or [(j,) for j in range(len(matchings))]
        coin_of = {j: g for g, members in enumerate(coins) for j in members}
        each = np.ones(len(matchings)) if costs is None else np.asarray(costs, dtype=np.float64)
        if not limit > 0:
            raise InputError(f"the limit on communication must be positive, not {limit!r}.")
        if not (np.isfinite(each).all() and (each > 0).all()):
            raise InputError("each matching must cost a positive, finite time.")
        self.num_workers, self.limit = num_workers, float(limit)
        self.group_of_matching = [coin_of[j] for j in range(len(matchings))]
        self.costs = np.bincount(self.group_of_matching, weights=each).astype(np.float64)
        ends = [link for matching in matchings for link in matching]
        owner = np.repeat(self.group_of_matching, [len(matching) for matching in matchings])
        order = np.argsort(owner, kind="stable")
        self.links = np.array(ends, dtype=np.int64).reshape(-1, 2)[order]
        self.owner = owner[order].astype(np.int64)
        """Group of each link, ascending."""
        self.offsets = np.searchsorted(self.owner, np.arange(len(coins) + 1))
        """Links of group g are offsets[g] : offsets[g + 1]."""

    def solve_reduced(self, V: Array, rows: Array, tolerance: float) -> tuple[Array, Array, Array]:
        """Solve the program in which only the directions V and the aggregates test p.

        Returns p, the dual Y of the directions, and ⟨dual, L_g⟩ for each group.
        """
        D = V[self.links[:, 0]] - V[self.links[:, 1]]
        L, k, M = *D.shape, len(self.costs)
        if 2 * L * L * k < 4 * M * k**3 + M * M * k * k:
            found = solve_factored(D, self.owner, rows, self.costs, self.limit, tolerance=tolerance)
        else:
            bounds = zip(self.offsets[:-1], self.offsets[1:], strict=True)
            A = np.array([D[i:j].T @ D[i:j] for i, j in bounds])
            limit = np.array([self.limit])
            found = solve(A[None], rows[None], self.costs[None], limit, tolerance=tolerance)
        Y = found.Y[0]
        lengths = ((D @ Y) * D).sum(1)
        gains = np.bincount(self.owner, weights=lengths) + found.y[0] @ rows
        return found.p[0], Y, gains

    def average_gains(self, V: Array) -> Array:
        """⟨Y, L_g⟩ with Y = VVᵀ / columns: the mean over a whole eigenspace."""
        if len(self.links) * V.shape[1] <= _GATHERED:
            lengths = ((V[self.links[:, 0]] - V[self.links[:, 1]]) ** 2).sum(1) / V.shape[1]
        else:  # of 1,000 workers who all talk to all, rows of V would take 4 GB for each end
            Y, (i, j) = V @ V.T / V.shape[1], self.links.T
            lengths = Y[i, i] + Y[j, j] - 2.0 * Y[i, j]
        return np.bincount(self.owner, weights=lengths).astype(np.float64)

    def spread_gains(self) -> Array:
        """⟨Y, L_g⟩ with Y = (I − J)/(m − 1): the mean over all directions."""
        return 2.0 * np.diff(self.offsets) / (self.num_workers - 1.0)

    def scale_to_limit(self, p: Array) -> Array:
        """Spend what an interior point leaves over; λ₂ never falls when weights rise."""
        p = np.where(p > 1.0 - 1e-9, 1.0, np.maximum(p, 0.0))
        for _ in range(3):
            free = p < 1.0
            left = self.limit - self.costs @ p
            spent = self.costs[free] @ p[free]
            if left <= 0.0 or spent <= 0.0:
                break
            p = np.where(free, np.minimum(1.0, p * (1.0 + left / spent)), p)
        over = self.costs @ p / self.limit
        return p / over if over > 1.0 else p


def _eigenspace(L: object, values: Array, vectors: Array) -> Array:
    """All of λ₂'s eigenvectors, by a dense decomposition where the first few are all equal."""
    same = values <= values[0] * (1.0 + 1e-6)
    if same.all() and len(values) < len(vectors) - 1 and len(vectors) <= _MULTIPLICITY_LIMIT:
        values, vectors = dense_eigenpairs(L, len(vectors) - 1)
        same = values <= values[0] * (1.0 + 1e-6)
    return np.asarray(vectors[:, same])


def _shrink(V: Array, Y: Array, most: int) -> Array:
    """The directions that the dual uses; what it gives the others stays as an aggregate row."""
    weights, mix = np.linalg.eigh(Y)
    keep = weights > 1e-4 * weights[-1]
    keep[:-most] = False
    return orthonormal(V @ mix[:, keep])
