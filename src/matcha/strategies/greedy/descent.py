"""Descent on a cycle's steady-state error: a matching at a time, then by each link's weight.

Once there is a whole cycle, what a covariance will cost from any point on is known exactly. At that
price V the best matching in a place minimises ⟨V, A X A⟩, with S its links, w the weight and
b_e = e_i − e_j,

    ⟨V, X⟩ − ⟨V, A X A⟩ = Σ_e 2w b_eᵀX V b_e − w² Σ_{e,f} (b_eᵀX b_f)(b_eᵀV b_f),

and replacing one by a better one lowers the error of the whole cycle.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from matcha._numerics.spectra import Array, Indices
from matcha.strategies.greedy.candidates import Candidate, SearchNetwork
from matcha.theory import cycles
from matcha.topology import parts_of

_HEAVIEST_WEIGHT = 0.95
_DIGITS = 3  # of a weight: more do not matter, and would swell a plan


def descend(candidate: Candidate, sweeps: int) -> Candidate:
    """Descend: replace matchings one at a time by better ones, and adjust the weight; repeat."""
    best = with_best_weight(candidate)
    for _ in range(sweeps):
        swept = with_best_weight(_sweep(best))
        if not swept.error < best.error * (1 - 1e-4):
            return swept if swept.error < best.error else best
        best = swept
    return best


def kick(candidate: Candidate, kicks: int, sweeps: int) -> Candidate:
    """Leave local minima: replace a stretch of matchings by random ones and descend again."""
    network, rng = candidate.network, np.random.default_rng(candidate.network.seed)
    length = len(candidate.matchings)
    best = candidate
    for _ in range(kicks):
        matchings, start = list(best.matchings), int(rng.integers(length))
        for n in range(start, start + max(2, length // 6)):
            limit = float(best.costs[n % length])
            weights = np.where(network.seconds <= limit, 0.5 + rng.random(len(network.links)), 0.0)
            matchings[n % length] = network.max_weight(weights)
        other = best.with_matchings(matchings).with_error()
        if math.isfinite(other.error):
            other = descend(other, sweeps)
        if other.error < best.error * (1 - 1e-9):
            best = other
    return best


def with_best_weight(candidate: Candidate) -> Candidate:
    """The same cycle with the weight that minimises its error."""
    from scipy.optimize import minimize_scalar

    def error(weight: float) -> float:
        found = replace(candidate, weight=float(weight)).with_error().error
        return found if math.isfinite(found) else 1e300

    current = candidate.with_error()
    low, high = current.weight - 0.12, min(current.weight + 0.12, _HEAVIEST_WEIGHT)
    found = minimize_scalar(error, bounds=(low, high), method="bounded", options={"xatol": 2e-3})
    other = replace(current, weight=round(float(found.x), _DIGITS)).with_error()
    return other if other.error < current.error else current


def _sweep(candidate: Candidate) -> Candidate:
    """One pass over the cycle, each matching replaced by the best one found at its price."""
    network, m, w = candidate.network, candidate.network.num_workers, candidate.weight
    turns, noise = candidate.turns(), cycles.centering(m)
    state = cycles.steady_state(turns, m, w)
    V = cycles.steady_adjoint(turns, m, w)
    if state is None or V is None:
        return candidate
    prices = cycles.price_after_each(turns, V, w)
    X = state.covariance.copy()
    matchings = list(candidate.matchings)
    for iterations, numbers in candidate.numbers():
        X += iterations * noise
        for n in numbers:
            allowed = network.seconds <= float(candidate.costs[n])
            better = _Cost(network, X, prices[n], w, allowed).improve(matchings[n])
            if network.loads is None or network.cost(better) <= candidate.costs[n]:
                matchings[n] = better
            cycles.conjugate(X, network.ends(matchings[n]), w)
    return candidate.with_matchings(matchings)


class _Cost:
    """⟨V, A X A⟩ − ⟨V, X⟩ of a matching: −linear of its links, and what any two of them couple."""

    def __init__(
        self, network: SearchNetwork, X: Array, V: Array, w: float, allowed: npt.NDArray[np.bool_]
    ) -> None:
        i, j = network.links.T
        self.network, self.w, self.allowed, self.edges = network, w, allowed, np.arange(len(i))
        self.BX, self.BV = X[i] - X[j], network.sides(V)
        self.linear = 2 * w * np.einsum("ek,ek->e", self.BX, self.BV)
        self.linear[~allowed] = -np.inf
        own = self.BX[self.edges, i] - self.BX[self.edges, j]
        self.diagonal = w * w * own * network.across(self.BV)

    def __call__(self, chosen: Indices) -> float:
        return float(self.coupling(chosen)[chosen].sum() - self.linear[chosen].sum())

    def coupling(self, chosen: Indices) -> Array:
        """w² (b_eᵀX b_f)(b_eᵀV b_f) for all links e and chosen links f."""
        f, g = self.network.links[chosen].T
        found: Array = self.w * self.w * (self.BX[:, f] - self.BX[:, g])
        return found * self.network.across(self.BV, chosen)

    def improve(self, current: Indices) -> Indices:
        """A matching that costs less, from two starts: the current and the heaviest one."""
        best, best_cost = current, self(current)
        floor = 1e-9 * abs(best_cost)
        for start in (current, self._heaviest(self.linear - self.diagonal)):
            if not len(start):
                continue
            chosen, value = start, self(start)
            for _ in range(4):
                # Links are worth what they gain next to the links chosen now.
                inside = np.where(np.isin(self.edges, chosen), self.diagonal, 0.0)
                beside = self.coupling(chosen).sum(axis=1) - inside
                other = self._heaviest(self.linear - self.diagonal - 2 * beside)
                if not len(other) or (other_value := self(other)) >= value:
                    break
                chosen, value = other, other_value
            if not self.network.directed:
                chosen, value = self._swap(chosen, value, floor)
            if value < best_cost - floor and len(chosen):
                best, best_cost = chosen, value
        return best

    def _heaviest(self, worth: Array) -> Indices:
        return self.network.max_weight(np.where(self.allowed, worth, 0.0))

    def _swap(self, chosen: Indices, value: float, floor: float) -> tuple[Indices, float]:
        """Descend by single moves: add a link, dropping those in its way, or drop one."""
        m, (i, j) = self.network.num_workers, self.network.links.T
        for _ in range(2 * m):
            size = len(chosen)
            # Position of the chosen link at each worker; `size` is a ghost link that costs nothing.
            owner = np.full(m, size)
            owner[self.network.links[chosen].ravel()] = np.repeat(np.arange(size), 2)
            Q = np.hstack([self.coupling(chosen), np.zeros((len(i), 1))])
            within = np.vstack([Q[chosen], np.zeros(size + 1)])
            drop = np.zeros(size + 1)
            drop[:size] = self.linear[chosen] - 2 * within[:size].sum(axis=1)
            drop[:size] += self.diagonal[chosen]
            a, b = owner[i], owner[j]
            change = self.diagonal - self.linear
            change += 2 * (Q.sum(axis=1) - Q[self.edges, a] - Q[self.edges, b])
            change += drop[a] + drop[b] + 2 * within[a, b]
            change[chosen] = np.inf
            add, remove = int(np.argmin(change)), int(np.argmin(drop[:size]))
            if min(change[add], drop[remove]) >= -floor:
                break
            if change[add] <= drop[remove]:
                stay = np.delete(chosen, [k for k in {int(a[add]), int(b[add])} if k < size])
                chosen = np.sort(np.append(stay, add))
                value += float(change[add])
            else:
                chosen = np.delete(chosen, remove)
                value += float(drop[remove])
            if not len(chosen):
                break
        return chosen, value


# -- a weight for every link ----------------------------------------------------------------------
# With prices V after a step and covariance X before it, A = I − Σ w_e b_e b_eᵀ gives
#
#     ∂⟨V, A X Aᵀ⟩ / ∂w_e = −2 b_eᵀ X Aᵀ V b_e,
#
# and, for messages that go one way, −2 e_rᵀ V A X (e_r − e_s). Round a circle of senders there is
# one weight, so that what a worker sends away comes back: A stays doubly stochastic.


def optimize_weights(candidate: Candidate) -> Candidate:
    """The same cycle with the weights of its links that minimise its error, by L-BFGS."""
    from scipy.optimize import minimize

    if not math.isfinite(candidate.error):
        return candidate
    groups = _groups(candidate)
    cuts = np.cumsum([len(chosen) for chosen in candidate.matchings])[:-1]

    def spread(values: Array) -> Candidate:
        return replace(candidate, weights=tuple(np.split(values[groups], cuts)))

    def objective(values: Array) -> tuple[float, Array]:
        error, gradient = _error_and_gradient(spread(values))
        return error, np.bincount(groups, weights=gradient).astype(np.float64)

    start = np.full(int(groups.max()) + 1, candidate.weight)
    found = minimize(
        objective,
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=[(0.0, _HEAVIEST_WEIGHT)] * len(start),
        options={"maxiter": 60},
    )
    better = spread(np.round(found.x, _DIGITS)).with_error()
    return better if better.error < candidate.error * (1 - 1e-6) else candidate


def _groups(candidate: Candidate) -> Indices:
    """For each link of each matching, in order, the weight that is its own: shared in a circle."""
    network, first, groups = candidate.network, 0, []
    for chosen in candidate.matchings:
        numbers = np.arange(len(chosen))
        if network.directed:
            part = parts_of(network.links[chosen], network.num_workers)
            numbers = np.unique(part[network.links[chosen, 0]], return_inverse=True)[1]
        groups.append(first + numbers)
        first += int(numbers.max(initial=-1)) + 1
    return np.concatenate(groups)


def _error_and_gradient(candidate: Candidate) -> tuple[float, Array]:
    network, m, w = candidate.network, candidate.network.num_workers, candidate.weight
    turns, noise = candidate.turns(), cycles.centering(m)
    state = cycles.steady_state(turns, m, w)
    V = cycles.steady_adjoint(turns, m, w)
    if state is None or V is None:
        return 1e6, np.zeros(sum(len(chosen) for chosen in candidate.matchings))
    prices = iter(cycles.price_after_each(turns, V, w))
    X, slopes = state.covariance.copy(), []
    for iterations, steps in turns:
        X += iterations * noise
        for ends in steps:
            # A X (e_i − e_j) in the columns of the links, then against what V makes of a link.
            V, D = next(prices), X[:, ends.i] - X[:, ends.j]
            cycles.mix(D, ends, w)
            side = V[:, ends.i] if network.directed else V[:, ends.i] - V[:, ends.j]
            slopes.append(-2 * np.einsum("ke,ke->e", D, side))
            cycles.conjugate(X, ends, w)
    return state.error, np.concatenate(slopes) / (cycles.length(turns) * m)
