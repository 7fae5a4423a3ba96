"""Step 4: the weight α of eq. 8 and the contraction factor ρ of eq. 9 and Theorem 1.

A round mixes by W = I − αL with L the Laplacian of its active links. With L̄ = E[L],

    ρ(α) = ‖E[WᵀW] − J‖₂ = λ_max(I − 2αL̄ + α²E[L²] − J),

and for independent coins E[L²] = L̄² + Σ_g p_g(1 − p_g) L_g², where L_g is what coin g activates
(for a matching L_g² = 2L_g: the paper's 2L̃). Each unit vector x ⊥ 1 gives a parabola
1 − 2α xᵀL̄x + α² xᵀE[L²]x, and ρ(α) is the highest of them: convex, so a search along α finds the
least ρ. The semidefinite program of eq. 9 finds the same number at a thousand times the price.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from matcha._numerics import on_one_thread
from matcha._numerics.spectra import (
    DENSE_LIMIT,
    Array,
    is_narrow,
    laplacian,
    lowest_eigenpairs,
    orthonormal,
    perpendicular_basis,
    start_vector,
    top_eigenpairs,
)
from matcha.errors import InputError, unknown_name
from matcha.topology import Link, Matching, Topology

_MAX_ITERATIONS = 30
_TOLERANCE = 1e-9
"""Of ρ above its minimum, and of the sums of a doubly stochastic matrix."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contraction:
    """A mixing weight and the factor by which one iteration contracts disagreement."""

    alpha: float
    rho: float
    """‖E[WᵀW] − J‖₂; consensus is reached when it is below 1 (Theorem 1)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moments:
    """The moments of a random Laplacian in eq. 9: E[L] and E[L²] − E[L]², both sparse."""

    mean: Any
    variance: Any

    @property
    def num_workers(self) -> int:
        """How many workers there are."""
        return int(self.mean.shape[0])

    def second(self, x: Array) -> Array:
        """E[L²] x."""
        return np.asarray(self.mean @ (self.mean @ x) + self.variance @ x)


def moments(
    matchings: Sequence[Matching],
    probabilities: Sequence[float],
    num_workers: int,
    groups: Sequence[Sequence[int]] = (),
    weights: Sequence[Sequence[float]] | None = None,
) -> Moments:
    """Mean and variance of the Laplacian when each matching is active independently.

    Matchings of a group, by position, share one coin and so one probability; without groups each
    has its own. Weights, one for each link of each matching, are 1 by default.

    >>> both = moments([((0, 1),)], [0.5], 2)
    >>> both.mean.toarray().tolist(), both.variance.toarray().tolist()
    ([[0.5, -0.5], [-0.5, 0.5]], [[0.5, -0.5], [-0.5, 0.5]])
    """
    p = np.asarray(probabilities, dtype=np.float64)
    if len(p) != len(matchings):
        raise InputError(f"{len(p)} probabilities were given for {len(matchings)} matchings.")
    links = np.array([link for matching in matchings for link in matching], dtype=np.int64)
    owner = np.repeat(np.arange(len(p)), [len(matching) for matching in matchings])
    w = np.ones(len(links)) if weights is None else np.concatenate([*map(np.asarray, weights)])
    mean = laplacian(links, num_workers, p[owner] * w)
    if all(len(group) == 1 for group in groups):
        variance = laplacian(links, num_workers, 2.0 * (p * (1.0 - p))[owner] * w**2)
        return Moments(mean=mean, variance=variance)
    variance = 0.0 * mean
    for group in groups:
        member = np.isin(owner, group)
        q = p[group[0]]
        L = laplacian(links[member], num_workers, w[member])
        variance = variance + q * (1.0 - q) * (L @ L)
    return Moments(mean=mean, variance=variance.tocsr())


def contraction_factor(of: Moments, alpha: float) -> float:
    """ρ(α) = λ_max(I − 2αL̄ + α²E[L²] − J), exactly.

    >>> contraction_factor(moments([((0, 1),)], [0.5], 2), 0.5)
    0.5
    """
    return float(_eigenvalues(of).top(alpha)[0][0])


@on_one_thread
def optimal_contraction(of: Moments) -> Contraction:
    """Find the α of eq. 9, which minimises ρ, and that ρ.

    Only the parabolas of a few vectors matter near the minimum: those of the slowest directions
    of L̄ and of the busiest workers. So keep the vectors found so far, minimise over their span
    (a lower bound), take the top eigenvectors at that α (an upper bound) and repeat until the two
    meet.

    >>> round(optimal_contraction(moments([((0, 1),)], [0.5], 2)).rho, 9)
    0.5
    """
    exact = _eigenvalues(of)
    V = exact.first()
    best = Contraction(alpha=0.0, rho=np.inf)
    for _ in range(_MAX_ITERATIONS):
        alpha, below = _least(V.T @ (of.mean @ V), V.T @ of.second(V))
        values, vectors = exact.top(alpha)
        if values[0] < best.rho:
            best = Contraction(alpha=alpha, rho=float(values[0]))
        if best.rho - below <= _TOLERANCE:
            break
        V = orthonormal(np.hstack([V, vectors]))
    # On a path of 100,000 workers ρ is within the tolerance of 1, and rounding may put it above.
    return replace(best, rho=min(best.rho, 1.0))


def vanilla_contraction(topology: Topology) -> Contraction:
    """All links at every iteration: α = 2/(λ₂ + λ_m), ρ = ((λ_m − λ₂)/(λ_m + λ₂))².

    >>> from matcha.topology.families import ring
    >>> vanilla_contraction(ring(4))
    Contraction(alpha=0.333..., rho=0.111...)
    """
    low, high = laplacian_extremes(topology.laplacian(), topology)
    return Contraction(alpha=2.0 / (low + high), rho=((high - low) / (high + low)) ** 2)


def periodic_contraction(topology: Topology, budget: float) -> Contraction:
    """All links every 1/C_b iterations: per iteration ρ = 1 − C_b + C_b·ρ_vanilla."""
    every = vanilla_contraction(topology)
    return Contraction(alpha=every.alpha, rho=1.0 - budget + budget * every.rho)


def single_contraction(algebraic_connectivity: float) -> Contraction:
    """At most one matching per iteration, drawn with probability p_j: α = 1/2, ρ = 1 − λ₂/2.

    Then E[L²] = Σ p_j L_j² = 2L̄, so ρ(α) = 1 − 2α(1 − α)λ₂(L̄): both ends of each link take
    their mean.
    """
    return Contraction(alpha=0.5, rho=1.0 - 0.5 * algebraic_connectivity)


def laplacian_extremes(matrix: Any, topology: Topology) -> tuple[float, float]:
    """λ₂ and λ_m of a Laplacian over the links of a topology."""
    m = topology.num_workers
    if m <= DENSE_LIMIT:
        values = np.linalg.eigvalsh(matrix.toarray())
        return float(values[1]), float(values[-1])
    start = start_vector(m, 0)
    narrow = is_narrow(topology.link_array, m)
    low, _ = lowest_eigenpairs(matrix, 4, narrow=narrow, start=start, tolerance=1e-8)
    high, _ = top_eigenpairs(lambda x: matrix @ x, m, 1, start, 1e-8)
    return float(low[0]), float(high[0])


def metropolis_weights(topology: Topology) -> dict[Link, float]:
    """Metropolis weights, from the degrees of a link's ends alone: 1/(1 + max(d_i, d_j)).

    With all links active no worker gives itself less than 1/(1 + d_i), so nothing extrapolates.

    >>> from matcha.topology.families import star
    >>> metropolis_weights(star(3))
    {(0, 1): 0.333..., (0, 2): 0.333...}
    """
    d = topology.degrees
    return {(i, j): 1 / (1 + max(d[i], d[j])) for i, j in topology.links}


def link_weights(given: Any, topology: Topology) -> dict[Link, float]:
    """The weight of each link, from `"metropolis"`, a mapping, or a mixing matrix W.

    Raises:
        InputError: W is not symmetric, its rows do not sum to one, it has an entry where there is
            no link, or a weight is not in [0, 1].
    """
    if topology.directed:
        raise InputError("weights of your own need links that carry both ways.")
    if isinstance(given, str):
        if given != "metropolis":
            raise unknown_name("weights", given, ("metropolis",))
        return metropolis_weights(topology)
    if isinstance(given, Mapping):
        found = dict(given)
    else:
        m = topology.num_workers
        try:
            W = np.asarray(given, dtype=np.float64)
        except (TypeError, ValueError):
            raise InputError(
                "weights must be 'metropolis', {(i, j): w, …}, or a matrix W."
            ) from None
        if W.shape != (m, m) or not is_doubly_stochastic(W) or not np.allclose(W, W.T, atol=1e-12):
            raise InputError(f"W must be a symmetric {m} × {m} matrix whose rows sum to one.")
        found = {(i, j): W[i, j] for i, j in np.argwhere(np.triu(W, 1)).tolist()}
    for link in found.keys() - set(topology.links):
        raise InputError(f"weights name {link}, which is not a link of the topology (i < j).")
    weights = {link: float(found.get(link, 0.0)) for link in topology.links}
    for link, w in weights.items():
        if not 0 <= w <= 1:
            raise InputError(f"the weight of link {link} is {w!r}, but it must be in [0, 1].")
    return weights


def is_doubly_stochastic(matrix: npt.ArrayLike, *, signed: bool = True) -> bool:
    """Whether all rows and columns of a mixing matrix sum to one.

    Negative entries, as the paper's I − αL may have, are accepted if `signed`.

    >>> is_doubly_stochastic([[0.5, 0.5], [0.5, 0.5]])
    True
    >>> is_doubly_stochastic([[1.5, -0.5], [-0.5, 1.5]], signed=False)
    False
    """
    W = np.asarray(matrix, dtype=np.float64)
    if W.ndim != 2 or W.shape[0] != W.shape[1] or not np.isfinite(W).all():
        return False
    sums = np.concatenate([W.sum(axis=0), W.sum(axis=1)])
    positive = signed or bool(W.min() >= -_TOLERANCE)
    return positive and bool(np.abs(sums - 1.0).max() <= _TOLERANCE)


# -- eigenvalues of E[WᵀW] − J --------------------------------------------------------------------


class _Dense:
    """Small graphs: everything in the basis perpendicular to ones."""

    def __init__(self, of: Moments) -> None:
        self.basis = Q = perpendicular_basis(of.num_workers)
        self.mean = Q.T @ of.mean.toarray() @ Q
        self.second = self.mean @ self.mean + Q.T @ of.variance.toarray() @ Q

    def first(self) -> Array:
        """The directions that α is chosen by at first: the slowest and the busiest."""
        _, vectors = np.linalg.eigh(self.mean)
        ends = vectors[:, [0, -1]] if len(vectors) > 1 else vectors
        return np.asarray(self.basis @ ends)

    def top(self, alpha: float) -> tuple[Array, Array]:
        """The largest eigenvalues at an α, falling, and their vectors."""
        B = np.eye(len(self.mean)) - 2.0 * alpha * self.mean + alpha**2 * self.second
        values, vectors = np.linalg.eigh(B)
        return values[::-1][:3], self.basis @ vectors[:, ::-1][:, :3]


class _Sparse:
    """Large graphs: a few eigenvectors by Lanczos iteration."""

    def __init__(self, of: Moments) -> None:
        self.of, self.start = of, start_vector(of.num_workers, 0)

    def first(self) -> Array:
        m, mean = self.of.num_workers, self.of.mean
        coo = mean.tocoo()
        links = np.stack([coo.row, coo.col], axis=1)[coo.row < coo.col].astype(np.int64)
        _, low = lowest_eigenpairs(mean, 4, narrow=is_narrow(links, m), start=self.start)
        _, high = top_eigenpairs(self.of.second, m, 2, self.start, 1e-6)
        V = orthonormal(np.hstack([low, high]))
        self.start = V.sum(axis=1)
        return V

    def top(self, alpha: float) -> tuple[Array, Array]:
        def apply(x: Array) -> Array:
            x = x - x.mean()
            return np.asarray(x - 2.0 * alpha * (self.of.mean @ x) + alpha**2 * self.of.second(x))

        values, vectors = top_eigenpairs(apply, self.of.num_workers, 3, self.start, 1e-8)
        self.start = vectors.sum(axis=1)
        return values, vectors


def _eigenvalues(of: Moments) -> _Dense | _Sparse:
    return _Dense(of) if of.num_workers <= DENSE_LIMIT else _Sparse(of)


def _least(P: Array, Q: Array) -> tuple[float, float]:
    """Minimise λ_max(I − 2αP + α²Q) over α, for small P, Q ≻ 0.

    Bisection on the sign of the slope: the minimum is mostly a kink, where two parabolas cross,
    and methods that expect a smooth function stop a digit or two short of it.
    """
    from scipy.linalg import eigh

    # Every parabola is lowest at xᵀPx/xᵀQx, so the minimum lies between the extremes of those.
    lows = eigh(P, Q, eigvals_only=True)
    low, high = float(lows[0]), float(lows[-1])
    eye = np.eye(len(P))
    alpha, height = high, np.inf
    while high - low > 1e-15 * high:
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        values, vectors = np.linalg.eigh(eye - 2.0 * middle * P + middle**2 * Q)
        if values[-1] < height:
            alpha, height = middle, float(values[-1])
        x = vectors[:, -1]
        low, high = (low, middle) if middle * (x @ Q @ x) > x @ P @ x else (middle, high)
    if height == np.inf:
        height = float(np.linalg.eigvalsh(eye - 2.0 * alpha * P + alpha**2 * Q)[-1])
    return alpha, height
