"""A weight for every link of a cycle: descent on the steady-state error by its exact gradient.

With prices V after a step and covariance X before it, A = I − Σ w_e b_e b_eᵀ gives

    ∂⟨V, A X Aᵀ⟩ / ∂w_e = −2 b_eᵀ X Aᵀ V b_e,

and, for messages that go one way, −2 e_rᵀ V A X (e_r − e_s). Round a circle of senders there is one
weight, so that what a worker sends away comes back: A stays doubly stochastic.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from matcha.strategies.greedy.candidates import Candidate
from matcha.strategies.greedy.max_weight import Indices
from matcha.theory import cycles
from matcha.theory.cycles import Array

_LEAST, _MOST = 0.0, 0.95
_DIGITS = 3  # of a weight: more do not matter, and would swell a plan


def optimize_weights(candidate: Candidate, iterations: int = 60) -> Candidate:
    """The same cycle with the weights of its links that minimise its error, by L-BFGS."""
    from scipy.optimize import minimize

    if not math.isfinite(candidate.error):
        return candidate
    groups, sizes = _groups(candidate), [len(chosen) for chosen in candidate.matchings]
    cuts = np.cumsum(sizes)[:-1]

    def spread(values: Array) -> Candidate:
        weights = np.split(values[groups], cuts)
        return replace(candidate, weights=tuple(weights))

    def objective(values: Array) -> tuple[float, Array]:
        error, gradient = _error_and_gradient(spread(values))
        return error, np.bincount(groups, weights=gradient).astype(np.float64)

    start = np.full(int(groups.max()) + 1, candidate.weight)
    found = minimize(
        objective,
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=[(_LEAST, _MOST)] * len(start),
        options={"maxiter": iterations},
    )
    better = spread(np.round(found.x, _DIGITS)).with_error()
    return better if better.error < candidate.error * (1 - 1e-6) else candidate


def _groups(candidate: Candidate) -> Indices:
    """For each link of each matching, in order, the weight that is its own: shared in a circle."""
    network, first, groups = candidate.network, 0, []
    for chosen in candidate.matchings:
        numbers = np.arange(len(chosen))
        if network.directed and len(chosen):
            numbers = _circles(network.links[chosen], network.num_workers)
        groups.append(first + numbers)
        first += int(numbers.max(initial=-1)) + 1
    return np.concatenate(groups)


def _circles(links: Indices, num_workers: int) -> Indices:
    """Which circle each link (receiver, sender) of a permutation is a part of."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    graph = coo_array((np.ones(len(links)), links.T), shape=(num_workers, num_workers))
    part = connected_components(graph, directed=False)[1]
    return np.unique(part[links[:, 0]], return_inverse=True)[1]


def _error_and_gradient(candidate: Candidate) -> tuple[float, Array]:
    network, m, w = candidate.network, candidate.network.num_workers, candidate.weight
    turns, noise = candidate.turns(), cycles.centering(m)
    state = cycles.steady_state(turns, m, w)
    V = cycles.steady_adjoint(turns, m, w)
    total = sum(len(chosen) for chosen in candidate.matchings)
    if state is None or V is None:
        return 1e6, np.zeros(total)
    before: list[Array] = []
    X = state.covariance.copy()
    for iterations, steps in turns:
        X += iterations * noise
        for ends in steps:
            before.append(X.copy())
            cycles.conjugate(X, ends, w)
    slopes: list[Array] = []
    for iterations, steps in reversed(turns):
        V = V + noise
        for ends in reversed(steps):
            X = before.pop()
            # A X (e_i − e_j) in the columns of the links, then against what V makes of a link.
            D = X[:, ends.i] - X[:, ends.j]
            cycles.mix(D, ends, w)
            side = V[:, ends.i] if network.directed else V[:, ends.i] - V[:, ends.j]
            slopes.append(-2 * np.einsum("ke,ke->e", D, side))
            cycles.conjugate_back(V, ends, w)
        V += (iterations - 1) * noise
    slopes.reverse()
    return state.error, np.concatenate(slopes) / (cycles.length(turns) * m)
