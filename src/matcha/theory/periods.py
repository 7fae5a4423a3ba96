"""The workers' disagreement when rounds repeat: its periodic solution, averaged over a period."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from matcha.rounds import Mixing, Round
from matcha.theory import cycles
from matcha.theory.cycles import Array, Turn
from matcha.topology import Matching


def cycle_error(
    matchings: Sequence[Matching],
    rounds: Sequence[tuple[int, ...]],
    m: int,
    mixing: Mixing,
    weight: float,
) -> float:
    """tr(X)/m averaged over a cycle of rounds; infinite where it never settles."""
    if mixing == "pairwise":
        state = cycles.steady_state(_turns(matchings, rounds), m, weight)
        return math.inf if state is None else state.error
    matrices = mixing_matrices(matchings, rounds, m, mixing, weight)
    if len(matrices) == 1:
        return _commuting_error(rounds, next(iter(matrices.values())), m)
    noise = cycles.centering(m)

    def advance(X: Array) -> tuple[Array, float]:
        total = 0.0
        for active in rounds:
            X = X + noise
            if active:
                W = matrices[active]
                X = W @ X @ W
            total += float(np.trace(X))
        return X, total

    product = _product(matrices, rounds, m)
    fixed = cycles.lyapunov(product, advance(np.zeros((m, m)))[0])
    return math.inf if fixed is None else advance(fixed)[1] / (len(rounds) * m)


def _commuting_error(rounds: Sequence[tuple[int, ...]], W: Array, m: int) -> float:
    """One symmetric W in all active rounds: every eigenvector of W evolves alone."""
    shrink = np.linalg.eigvalsh(W - 1 / m) ** 2
    # J's own direction carries no disagreement; W − J maps it to 0, so drop one zero.
    shrink = np.delete(shrink, int(np.argmin(shrink)))
    if shrink.max() > 1 - 1e-12:
        return math.inf
    state, factor = np.zeros(m - 1), np.ones(m - 1)
    for active in rounds:
        state += 1
        if active:
            state *= shrink
            factor *= shrink
    state /= 1 - factor
    total = 0.0
    for active in rounds:
        state += 1
        if active:
            state *= shrink
        total += float(state.sum())
    return total / (len(rounds) * m)


def cycle_contraction(
    matchings: Sequence[Matching],
    rounds: Sequence[tuple[int, ...]],
    m: int,
    mixing: Mixing,
    weight: float,
) -> float:
    """ρ of a cycle of rounds: ‖Φ − J‖^(2 / length), Φ the product of its mixing matrices."""
    if mixing == "pairwise":
        return cycles.contraction(_turns(matchings, rounds), m, weight)
    matrices = mixing_matrices(matchings, rounds, m, mixing, weight)
    steps = (matrices[active] for active in rounds if active)
    return cycles.rescaled_contraction((step.__matmul__ for step in steps), m, len(rounds))


def _product(
    matrices: dict[tuple[int, ...], Array], rounds: Sequence[tuple[int, ...]], m: int
) -> Array:
    """Φ − J, what a whole cycle leaves of a disagreement."""
    product = cycles.centering(m)
    for active in rounds:
        if active:
            product = matrices[active] @ product
    return product


def mixing_matrices(
    matchings: Sequence[Matching],
    rounds: Sequence[tuple[int, ...]],
    m: int,
    mixing: Mixing,
    weight: float,
) -> dict[tuple[int, ...], Array]:
    """W of every distinct round in which somebody talks."""
    return {
        active: Round(
            matchings=tuple(matchings[j] for j in active),
            indices=active,
            mixing=mixing,
            weight=weight,
        ).matrix(m)
        for active in set(rounds)
        if active
    }


def _turns(matchings: Sequence[Matching], rounds: Sequence[tuple[int, ...]]) -> list[Turn]:
    known = [cycles.step(matching) for matching in matchings]
    return [
        (iterations, [known[j] for j in active if len(known[j].i)])
        for iterations, active in cycles.turns_of(rounds)
    ]
