"""MATCHA: each matching is active by a coin of its own, weighted toward critical links."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np

from matcha._numerics.spectra import Array, laplacian
from matcha.activation import Activation, optimal_probabilities
from matcha.errors import InputError
from matcha.matchings import Groups, cliques, single_links
from matcha.mixing import (
    laplacian_extremes,
    moments,
    optimal_contraction,
    single_contraction,
    vanilla_contraction,
)
from matcha.plans import Plan
from matcha.rounds import Mixing
from matcha.schedules import Bernoulli, Choice
from matcha.strategies.recoloring import improve
from matcha.strategies.strategy import (
    Alpha,
    Decomposition,
    Effort,
    Request,
    Strategy,
    Weights,
    assemble_plan,
    check_affordable,
    check_probabilities,
)
from matcha.theory import cycles
from matcha.theory.cycles import Step
from matcha.topology import Matching

_OWN = ("the probabilities are yours.",)
_PAIRWISE_UP_TO = 2048  # workers: E[WᵀW] is a dense matrix
_ORDERED_UP_TO = 128


@dataclass(frozen=True, kw_only=True)
class Matcha(Strategy):
    """Each matching by a coin of its own: the paper's method.

    Args:
        mixing: `laplacian` (the paper's I − αL, the default) or `pairwise`.
        decomposition: What the links are split into: `matchings`, single `links`, `cliques`.
        effort: How long to search for a good decomposition: `none`, `default` or `high`.
        probabilities: Your own, one per matching; by default the best.
        alpha: As for `Periodic`.
        weights: As for `Periodic`, with laplacian mixing.
    """

    name = "matcha"
    about = "each matching by a coin of its own (the paper)"
    mixings = ("laplacian", "pairwise")
    compared = True
    mixing: Mixing | None = None
    decomposition: Decomposition = "matchings"
    effort: Effort = "default"
    probabilities: Iterable[float] | None = None
    alpha: Alpha | None = None
    weights: Weights | None = None

    def build(self, request: Request) -> Plan:
        """Decompose, optimise probabilities (eq. 5), then the weight (eq. 9)."""
        m, colors, timing = request.topology.num_workers, request.colors, request.timing
        matchings, groups = self._subgraphs(request)
        costs = timing.costs(matchings)
        compared = (colors, matchings) if len(matchings) == len(colors) else (colors,)
        limit = min(timing.allowance(some, request.budget) for some in compared)
        alpha, certificate, figures = 0.5, None, {}
        if self.probabilities is not None:
            p = check_probabilities(self.probabilities, matchings)
        else:
            found = optimal_probabilities(
                matchings,
                m,
                limit,
                costs=costs,
                groups=groups,
                seed=request.seed,
                progress=request.progress,
            )
            if request.mixing == "pairwise":
                if groups:
                    raise InputError(
                        "pairwise mixing needs a coin for each matching: cliques share coins."
                    )
                return _pairwise(request, matchings, found, costs, limit)
            p, certificate = found.probabilities, found.certificate
        schedule = Bernoulli(probabilities=p, seed=request.seed, groups=groups)
        if certificate is None:
            cost = sum(q * c for q, c in zip(p, costs, strict=True))
            check_affordable(request, cost, limit, "the probabilities")
        if request.mixing == "laplacian":
            # When every link is always active, exactly those of vanilla.
            if min(p) == 1.0:
                best = vanilla_contraction(request.topology)
            else:
                best = optimal_contraction(moments(matchings, p, m, groups))
            alpha = best.alpha
            if certificate is not None:
                figures = {"rho": best.rho, "algebraic_connectivity": certificate.value}
        return assemble_plan(
            request,
            matchings=matchings,
            schedule=schedule,
            alpha=alpha,
            figures=figures,
            certificate=certificate,
            notes=() if certificate else _OWN,
            beside_periodic=True,
        )

    def _subgraphs(self, request: Request) -> tuple[tuple[Matching, ...], Groups]:
        """Split the links as the user asked: what coins activate, and which of it shares a coin."""
        if request.matchings is not None:
            return request.matchings, ()
        if self.decomposition == "links":
            return single_links(request.topology), ()
        if self.decomposition == "cliques":
            return cliques(request.topology)
        return improve(request, self.effort), ()


def _pairwise(
    request: Request,
    matchings: tuple[Matching, ...],
    found: Activation,
    costs: Sequence[float],
    limit: float,
) -> Plan:
    """Each matching sees the result of the one before; ρ itself is minimised, from eq. 5's p."""
    topology, m = request.topology, request.topology.num_workers
    best = optimal_activation(matchings, found.probabilities, m, limit, costs)
    matchings = tuple(matchings[j] for j in best.order)
    links = np.array([link for matching in matchings for link in matching])
    weights = np.repeat(best.probabilities, [len(matching) for matching in matchings])
    connectivity = laplacian_extremes(laplacian(links, m, weights), topology)[0]
    return assemble_plan(
        request,
        matchings=matchings,
        schedule=Bernoulli(probabilities=best.probabilities, seed=request.seed),
        alpha=0.5,
        figures={"rho": best.rho, "algebraic_connectivity": connectivity},
        certificate=found.certificate,
        notes=(
            f"probabilities and order minimise rho itself: {best.rho:.4f}, against "
            f"{best.start_rho:.4f} for those that maximise the connectivity; the certificate "
            "is of the latter.",
        ),
        beside_periodic=True,
    )


@dataclass(frozen=True, kw_only=True)
class Single(Strategy):
    """At most one matching per iteration, drawn (section 3, "Extension").

    Both ends of a link then take their mean, so laplacian mixing with weight ½ and pairwise mixing
    are the same.

    Args:
        mixing: `laplacian` or `pairwise`.
        probabilities: Your own, one per matching; by default the best.
        alpha: As for `Periodic`.
        weights: As for `Periodic`, with laplacian mixing.
    """

    name = "single"
    about = "at most one matching per iteration, drawn"
    mixings = ("laplacian", "pairwise")
    mixing: Mixing | None = None
    probabilities: Iterable[float] | None = None
    alpha: Alpha | None = None
    weights: Weights | None = None

    def build(self, request: Request) -> Plan:
        colors, timing, seed = request.colors, request.timing, request.seed
        limit, certificate, figures = request.budget * request.full_time, None, {}
        if self.probabilities is not None:
            p = check_probabilities(self.probabilities, colors)
            cost = Choice(probabilities=p, seed=seed).expected_time(timing, colors)
            check_affordable(request, cost, limit, "the probabilities")
        else:
            # With these costs Σ p_j · cost_j <= 1 keeps both Σ p_j <= 1 and the expected time in
            # budget. Only one of the two binds unless some matchings cost more than the budget and
            # others less; in between, the larger share of each matching is charged.
            costs = [max(1.0, timing.matching_time(matching) / limit) for matching in colors]
            m, progress = request.topology.num_workers, request.progress
            found = optimal_probabilities(colors, m, 1.0, costs=costs, seed=seed, progress=progress)
            p, certificate = found.probabilities, found.certificate
            rho = single_contraction(certificate.value).rho
            figures = {"rho": rho, "algebraic_connectivity": certificate.value}
        return assemble_plan(
            request,
            schedule=Choice(probabilities=p, seed=seed),
            alpha=0.5,
            figures=figures,
            certificate=certificate,
            notes=() if certificate else _OWN,
            beside_periodic=True,
        )


# -- pairwise mixing: the order and the probabilities that minimise ρ itself -----------------------
# A round applies W = A_r ··· A_2 A_1, where A_j = I − w L_j moves both ends of each link of
# matching j towards each other (w = ½: to their mean) and is skipped by a coin with probability
# 1 − p_j. Conditioning on one coin at a time gives E[WᵀW] exactly: starting from X = I,
# X ← (1 − p_j) X + p_j A_j X A_j with the matching applied last coming first; ρ = λ_max(X − J).


class PairwiseActivation(NamedTuple):
    """An order of exchange, probabilities in that order, and the contraction they give."""

    order: tuple[int, ...]
    probabilities: tuple[float, ...]
    rho: float
    start_rho: float
    """ρ of the probabilities that the search started from, in their own order."""


def optimal_activation(
    matchings: Sequence[Matching],
    start: Sequence[float],
    num_workers: int,
    limit: float,
    costs: Sequence[float],
) -> PairwiseActivation:
    """Minimise ρ itself over the order of matchings and probabilities with Σ p_j · cost_j <= limit.

    The order is improved by exchanging two matchings at a time, the probabilities by projected
    gradient steps through the recursion; both accept only what lowers the exact ρ, so the answer
    is never worse than the start, such as the probabilities that maximise λ₂ (eq. 5).
    """
    if num_workers > _PAIRWISE_UP_TO:
        raise InputError(
            f"pairwise mixing is optimised exactly for up to {_PAIRWISE_UP_TO} workers, "
            f"not {num_workers}: use the greedy strategy, or laplacian mixing."
        )
    search = _PairwiseSearch([cycles.step(matching) for matching in matchings], num_workers)
    p, order = np.asarray(start, dtype=np.float64), list(range(len(matchings)))
    start_rho = rho = search.rho(p, order)
    for _ in range(2 if num_workers <= _ORDERED_UP_TO else 1):
        if num_workers <= _ORDERED_UP_TO:
            order, rho = search.improve_order(p, order, rho)
        p, rho = search.descend(p, order, rho, np.asarray(costs, dtype=np.float64), limit)
    return PairwiseActivation(tuple(order), tuple(p[order].tolist()), rho, start_rho)


def project(p: Array, costs: Array, limit: float) -> Array:
    """The nearest point with 0 <= p <= 1 and Σ p_j · cost_j <= limit."""
    clipped: Array = np.clip(p, 0.0, 1.0)
    if clipped @ costs <= limit:
        return clipped
    low, high = 0.0, float(np.max(p / costs))
    for _ in range(200):
        middle = (low + high) / 2
        over = np.clip(p - middle * costs, 0.0, 1.0) @ costs > limit
        low, high = (middle, high) if over else (low, middle)
    projected: Array = np.clip(p - high * costs, 0.0, 1.0)
    return np.round(projected, 15)


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


class _PairwiseSearch(NamedTuple):
    steps: Sequence[Step]
    num_workers: int

    def rho(self, p: Array, order: Sequence[int]) -> float:
        chain = [(float(p[j]), self.steps[j]) for j in reversed(order)]
        return _top(cycles.expected_conjugate(np.eye(self.num_workers), chain))[0]

    def gradient(self, p: Array, order: Sequence[int]) -> Array:
        """∂ρ/∂p by running the recursion forward and its adjoint back."""
        states = []
        X = np.eye(self.num_workers)
        for j in reversed(order):
            mixed = X.copy()
            cycles.conjugate(mixed, self.steps[j], 0.5)
            states.append((j, mixed - X))
            X = X + p[j] * (mixed - X)
        _, U = _top(X)
        gradient = np.zeros(len(self.steps))
        for j, change in reversed(states):
            gradient[j] = float(np.sum(U * change))
            U = cycles.expected_conjugate(U, [(float(p[j]), self.steps[j])])
        return gradient

    def descend(
        self, p: Array, order: Sequence[int], rho: float, costs: Array, limit: float
    ) -> tuple[Array, float]:
        """Projected gradient steps, as long as they lower ρ."""
        size = 0.1
        for _ in range(60 if self.num_workers <= 256 else 8):
            gradient = self.gradient(p, order)
            length = float(np.linalg.norm(gradient))
            if length == 0:
                break
            while size > 1e-5:
                candidate = project(p - size * gradient / length, costs, limit)
                found = self.rho(candidate, order)
                if found < rho - 1e-12:
                    p, rho = candidate, found
                    size *= 1.5
                    break
                size /= 2
            else:
                break
        return p, rho

    def improve_order(self, p: Array, order: list[int], rho: float) -> tuple[list[int], float]:
        """Exchange two matchings while that lowers ρ: one pass over all pairs, or neighbours."""
        n = len(order)
        pairs = combinations(range(n), 2) if n <= 16 else ((a, a + 1) for a in range(n - 1))
        for a, b in pairs:
            other = order.copy()
            other[a], other[b] = other[b], other[a]
            found = self.rho(p, other)
            if found < rho - 1e-12:
                order, rho = other, found
        return order, rho
