"""Step 1, continued: among decompositions of one size, look for one that contracts faster.

The decomposition decides how much of the budget's connectivity can be had: on the paper's er8 at
C_b = 0.5, random colourings of the same size give ρ between 0.64 and 0.77. We walk among
colourings by Kempe exchanges. At each step every exchange is screened to first order, with the
probabilities and the weight held fixed; the most promising ones are planned properly (eq. 5 and
eq. 9) and the walk moves to the best of them, uphill if it must, never to a decomposition it has
seen: tabu search. All is counted in steps, not seconds, so the same seed gives the same
decomposition on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import combinations, pairwise
from typing import NamedTuple

import numpy as np

from matcha._numerics import on_one_thread, stepper
from matcha._numerics.semidefinite import solve
from matcha._numerics.spectra import Array, Indices, laplacian, perpendicular_basis
from matcha.activation import optimal_probabilities
from matcha.matchings import Coloring, classes_of, sort_matchings
from matcha.mixing import moments, optimal_contraction
from matcha.strategies.strategy import Effort, Request
from matcha.topology import Matching

_STACKED_UP_TO = 24
"""Workers up to which candidates are planned as one stack of full-size programs."""
_SEARCHED_UP_TO = {"default": 128, "high": 512}
"""Workers up to which the search is worth its time."""
_COLORS_UP_TO = 40
"""Colours up to which it is, where candidates are planned one by one."""
_NEIGHBOR_WORK = 20_000
"""Colour pairs times links that one step may look at."""
_SCREEN_ORDER = 6


class _Walk(NamedTuple):
    """How long to search."""

    steps: int
    tries: int
    """Candidates planned properly at each step."""
    patience: int
    """Steps without progress after which the walk ends."""
    restarts: int
    """Walks from a shaken copy of the best found."""


_STACKED: dict[Effort, _Walk] = {"default": _Walk(24, 8, 8, 0), "high": _Walk(100, 24, 25, 5)}
# Each candidate is a plan of its own here, tens of milliseconds.
_ONE_BY_ONE: dict[Effort, _Walk] = {"default": _Walk(8, 2, 3, 0), "high": _Walk(40, 4, 8, 1)}


class _Scored(NamedTuple):
    """A colouring, as the colour of each link, and the plan it leads to."""

    colors: Indices
    p: Array
    alpha: float
    rho: float


@on_one_thread
def improve(request: Request, effort: Effort = "default") -> tuple[Matching, ...]:
    """A decomposition of the same size as the request's whose plan has no larger ρ.

    With link times the comparison is at equal seconds: a candidate may spend no more than the
    decomposition that the search started from. The request's seed decides the restarts, and the
    samples on graphs with very many colours.
    """
    matchings, timing, m = request.colors, request.timing, request.topology.num_workers
    limit = timing.allowance(matchings, request.budget)
    pointless = len(matchings) < 2 or limit >= sum(timing.costs(matchings)) * (1.0 - 1e-12)
    if effort == "none" or pointless or m > _SEARCHED_UP_TO[effort]:
        return matchings
    if m > _STACKED_UP_TO and len(matchings) > _COLORS_UP_TO:
        return matchings
    problem = _Recoloring(request, limit)
    first = problem.plan([problem.colors_of(matchings)])[0]
    walks = _STACKED if m <= _STACKED_UP_TO else _ONE_BY_ONE
    short, walk, seen = walks["default"], walks[effort], {problem.key(first.colors)}
    number = walk.restarts + (effort == "high")
    what = "steps among decompositions at most"
    step = stepper(short.steps + number * walk.steps, what, request.progress)
    best = _search(problem, first, short, {problem.key(first.colors)}, step)
    if effort == "high":  # a wider walk takes another way, not always a better one
        best = min(best, _search(problem, first, walk, seen, step), key=lambda state: state.rho)
    for _ in range(walk.restarts):
        shaken = problem.plan([problem.shake(best.colors)])[0]
        best = min(best, _search(problem, shaken, walk, seen, step), key=lambda state: state.rho)
    # The walk plans to a few digits; only a gain that stands to all of them counts.
    before, after = problem.plan_each([first.colors, best.colors], None)
    if after.rho >= before.rho:
        return matchings
    return sort_matchings(request.topology, problem.matchings_of(best.colors))


def _search(
    problem: _Recoloring,
    start: _Scored,
    walk: _Walk,
    seen: set[bytes],
    step: Callable[[], None],
) -> _Scored:
    here, best, waited = start, start, 0
    for _ in range(walk.steps):
        options = problem.neighbors(here.colors)
        if not options or waited >= walk.patience:
            break
        chosen: list[Indices] = []
        for n in np.argsort(problem.screen(here, np.array(options)), kind="stable"):
            key = problem.key(options[n])
            if key not in seen:
                seen.add(key)
                chosen.append(options[n])
            if len(chosen) == walk.tries:
                break
        if not chosen:
            break
        here = min(problem.plan(chosen), key=lambda state: state.rho)
        waited += 1
        step()
        if here.rho < best.rho - 1e-6:
            best, waited = here, 0
    return best


class _Recoloring:
    """What the search knows of the topology and the budget, as arrays."""

    def __init__(self, request: Request, limit: float) -> None:
        topology = request.topology
        self.rng = np.random.default_rng(request.seed)
        self.num_workers, self.num_colors = topology.num_workers, len(request.colors)
        self.links, self.ends = topology.links, topology.link_array
        self.index = topology.columns
        self.timing, self.budget, self.limit = request.timing, request.budget, limit

    @cached_property
    def products(self) -> Array:
        """b_e b_eᵀ of each link, flattened, in the basis perpendicular to ones."""
        Q = perpendicular_basis(self.num_workers)
        D = Q[self.ends[:, 0]] - Q[self.ends[:, 1]]
        return np.asarray((D[:, :, None] * D[:, None, :]).reshape(len(D), -1))

    # -- colourings as values ---------------------------------------------------------------------

    def colors_of(self, matchings: Sequence[Matching]) -> Indices:
        colors = np.zeros(len(self.links), dtype=np.int64)
        for color, matching in enumerate(matchings):
            colors[[self.index[link] for link in matching]] = color
        return colors

    def matchings_of(self, colors: Indices) -> tuple[Matching, ...]:
        return classes_of(self.links, colors.tolist(), self.num_colors)

    def key(self, colors: Indices) -> bytes:
        """The same for colourings that differ only in the names of colours."""
        _, first, inverse = np.unique(colors, return_index=True, return_inverse=True)
        return np.argsort(np.argsort(first))[inverse].astype(np.int16).tobytes()

    def neighbors(self, colors: Indices) -> list[Indices]:
        """Every colouring one Kempe exchange away; where those are too many, a sample."""
        coloring = Coloring.from_matchings(self.matchings_of(colors), self.num_workers)
        pairs = list(combinations(range(self.num_colors), 2))
        most = max(1, _NEIGHBOR_WORK // len(self.links))
        if len(pairs) > most:
            pairs = [pairs[n] for n in self.rng.choice(len(pairs), size=most, replace=False)]
        found = []
        for a, b in pairs:
            chains = coloring.chains(a, b)
            # Exchanging one of two chains, or all but one, differs only in colour names.
            for chain in chains if len(chains) > 2 else chains[1:]:
                links, moved = [self.index[link] for link in pairwise(chain)], colors.copy()
                moved[links] = a + b - colors[links]
                found.append(moved)
        return found

    def shake(self, colors: Indices) -> Indices:
        """A few random exchanges away."""
        for _ in range(2 * self.num_colors):
            options = self.neighbors(colors)
            if options:
                colors = options[self.rng.integers(len(options))]
        return colors

    # -- what they are worth ----------------------------------------------------------------------

    def costs(self, colors: Indices) -> tuple[Array, float]:
        """What each matching costs, and how much may be spent."""
        matchings = self.matchings_of(colors)
        allowed = min(self.limit, self.timing.allowance(matchings, self.budget))
        return np.array(self.timing.costs(matchings)), allowed

    def screen(self, here: _Scored, candidates: Indices) -> Array:
        """ρ of each candidate to first order: p and α stay, the top eigenvectors stay.

        Recolouring link l from a to b changes its mean weight by δ = p_b − p_a and its variance
        by ε, so E[WᵀW] by δ(−2αL_l + α²(L̄L_l + L_lL̄)) + 2α²εL_l: for each link two small
        matrices in the span of the top eigenvectors.
        """
        p, alpha, m, (i, j) = here.p, here.alpha, self.num_workers, self.ends.T
        variance = p * (1.0 - p)
        mean = laplacian(self.ends, m, p[here.colors]).toarray()
        B = np.eye(m) - 2.0 * alpha * mean - 1.0 / m
        spread = laplacian(self.ends, m, (2.0 * variance)[here.colors])
        B += alpha**2 * (mean @ mean + spread.toarray())
        values, vectors = np.linalg.eigh(B)
        values, V = values[-_SCREEN_ORDER:], vectors[:, -_SCREEN_ORDER:]
        w, G = V[i] - V[j], mean @ V
        square = w[:, :, None] * w[:, None, :]
        cross = (G[i] - G[j])[:, :, None] * w[:, None, :]
        of_mean = -2.0 * alpha * square + alpha**2 * (cross + cross.swapaxes(1, 2))
        of_variance = 2.0 * alpha**2 * square
        delta = p[candidates] - p[here.colors]
        epsilon = variance[candidates] - variance[here.colors]
        change = delta @ of_mean.reshape(len(w), -1) + epsilon @ of_variance.reshape(len(w), -1)
        small = np.diag(values) + change.reshape(-1, len(values), len(values))
        rho: Array = np.linalg.eigvalsh(small)[:, -1]
        if self.timing.unit == "units":
            return rho
        # A candidate whose matchings cost more must use them less often.
        affordable = [
            min(1.0, allowed / float(c @ p)) for c, allowed in map(self.costs, candidates)
        ]
        rho = 1.0 - (1.0 - rho) * np.array(affordable)
        return rho

    def plan(self, candidates: Sequence[Indices]) -> list[_Scored]:
        """Plan to a few digits: small programs as one stack of full size, large ones one by one."""
        if self.num_workers > _STACKED_UP_TO:
            return self.plan_each(candidates, 1e-3)
        N, M, k = len(candidates), self.num_colors, self.num_workers - 1
        members = (np.array(candidates)[:, None, :] == np.arange(M)[:, None]).astype(np.float64)
        A = members @ self.products
        costs, allowed = (np.array(some) for some in zip(*map(self.costs, candidates), strict=True))
        p = solve(A.reshape(N, M, k, k), np.empty((N, 0, M)), costs, allowed, tolerance=1e-4).p
        mean = (p[:, None] @ A).reshape(N, k, k)
        variance = ((2.0 * p * (1.0 - p))[:, None] @ A).reshape(N, k, k)
        alpha, rho = _least_of_each(mean, mean @ mean + variance)
        return list(map(_Scored, candidates, p, alpha.tolist(), rho.tolist()))

    def plan_each(self, candidates: Sequence[Indices], tolerance: float | None) -> list[_Scored]:
        """Plan by eq. 5 and eq. 9."""
        found = []
        for colors in candidates:
            matchings, (costs, allowed) = self.matchings_of(colors), self.costs(colors)
            p = optimal_probabilities(
                matchings, self.num_workers, allowed, costs=costs.tolist(), tolerance=tolerance
            ).probabilities
            best = optimal_contraction(moments(matchings, p, self.num_workers))
            found.append(_Scored(colors, np.array(p), best.alpha, best.rho))
        return found


def _least_of_each(P: Array, Q: Array) -> tuple[Array, Array]:
    """For a stack of matrices, the α that minimises λ_max(I − 2αP + α²Q), to six digits.

    Keeps one falling and one rising parabola for each and goes to the lowest point of the two.
    """
    alpha = np.trace(P, axis1=1, axis2=2) / np.trace(Q, axis1=1, axis2=2)
    best_alpha, best = alpha, np.full(len(P), np.inf)
    falling, rising = np.full((2, 2, len(P)), np.nan)
    for _ in range(12):
        shift = alpha[:, None, None]
        values, vectors = np.linalg.eigh(np.eye(P.shape[1]) - 2.0 * shift * P + shift**2 * Q)
        x = vectors[:, :, -1:]
        parabola = np.stack([(P @ x * x).sum((1, 2)), (Q @ x * x).sum((1, 2))])
        better = values[:, -1] < best
        best = np.where(better, values[:, -1], best)
        best_alpha = np.where(better, alpha, best_alpha)
        falls = alpha * parabola[1] < parabola[0]
        falling, rising = np.where(falls, parabola, falling), np.where(falls, rising, parabola)
        # Lowest points, NaN while one side is unknown; then the other side's own is next.
        low_of_rising, low_of_falling = rising[0] / rising[1], falling[0] / falling[1]
        with np.errstate(divide="ignore", invalid="ignore"):
            crossing = 2.0 * (rising[0] - falling[0]) / (rising[1] - falling[1])
        known = np.clip(crossing, low_of_rising, low_of_falling)
        next_alpha = np.where(np.isnan(rising[0]), low_of_falling, low_of_rising)
        next_alpha = np.where(np.isfinite(known), known, next_alpha)
        if (np.abs(next_alpha - alpha) <= 1e-7 * alpha).all():
            break
        alpha = next_alpha
    return best_alpha, best
