"""The workers' disagreement when rounds repeat: its periodic solution, averaged over a period."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from matcha.rounds import EXACT, Mixing, Round, Shares
from matcha.theory import cycles
from matcha.theory.cycles import Array, Turn
from matcha.theory.parts import Parts
from matcha.topology import Matching

_SETTLING = 10_000  # cycles until ω repeats; it contracts like everything else


def cycle_error(
    matchings: Sequence[Matching],
    rounds: Sequence[tuple[int, ...]],
    m: int,
    mixing: Mixing,
    weight: float,
    weights: Shares | None = None,
) -> float:
    """tr(X)/m averaged over a cycle of rounds; infinite where it never settles."""
    if mixing == "push" and not all(
        Round.of_active(
            matchings, active, mixing=mixing, weight=weight, weights=weights
        ).keeps_shares
        for active in set(rounds)
    ):
        return push_sum_error(push_turns(matchings, rounds, m, weight, weights), m)
    if mixing != "laplacian" and mixing not in EXACT:
        turns_ = _turns(matchings, rounds, mixing, weights)
        # Without a way between some, nothing settles; rounding must not hide it.
        joined = cycles.connects(turns_, m)
        state = cycles.steady_state(turns_, m, weight) if joined else None
        return math.inf if state is None else state.error
    matrices = mixing_matrices(matchings, rounds, m, mixing, weight, weights)
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
    weights: Shares | None = None,
) -> float:
    """ρ of a cycle of rounds: ‖Φ − J‖^(2 / length), Φ the product of its mixing matrices."""
    if mixing != "laplacian" and mixing not in EXACT:
        return cycles.contraction(_turns(matchings, rounds, mixing, weights), m, weight)
    matrices = mixing_matrices(matchings, rounds, m, mixing, weight, weights)
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
    weights: Shares | None = None,
) -> dict[tuple[int, ...], Array]:
    """W of every distinct round in which somebody talks."""
    return {
        active: Round.of_active(
            matchings, active, mixing=mixing, weight=weight, weights=weights
        ).matrix(m)
        for active in set(rounds)
        if active
    }


def push_turns(
    matchings: Sequence[Matching],
    rounds: Sequence[tuple[int, ...]],
    m: int,
    weight: float,
    weights: Shares | None = None,
) -> list[tuple[int, Array | None]]:
    """A cycle of messages as stretches of iterations, each with the matrix of its last round."""
    made = mixing_matrices(matchings, rounds, m, "push", weight, weights)
    return [(wait, made.get(tuple(active))) for wait, active in cycles.turns_of(rounds)]


def push_sum_error(turns: Sequence[tuple[int, Array | None]], m: int) -> float:
    """The error of push-sum, whose columns alone sum to one, over a cycle of rounds.

    With ω the weights and u = x − ω·(1ᵀx/m), a round maps u to Wu and ω to Wω, and what workers
    hold differs from the average by u/ω. Unit noise enters u without its part along ω.
    """
    transition, omega = np.eye(m), _settled_weights(turns, m)
    if float(omega.min()) <= 0:
        return math.inf
    for _, W in turns:
        transition = transition if W is None else W @ transition
    start = omega

    def advance(U: Array) -> tuple[Array, float]:
        total, omega = 0.0, start
        for wait, W in turns:
            noise = np.eye(m) - np.outer(omega, np.ones(m)) / m
            noise = noise @ noise.T
            for _ in range(wait - 1):
                U = U + noise
                total += float(np.sum(np.diagonal(U) / omega**2))
            U = U + noise
            if W is not None:
                U, omega = W @ U @ W.T, W @ omega
            total += float(np.sum(np.diagonal(U) / omega**2))
        return U, total

    fixed = cycles.lyapunov(
        transition - np.outer(start, np.ones(m)) / m, advance(0 * transition)[0]
    )
    if fixed is None:
        return math.inf
    return advance(fixed)[1] / (sum(wait for wait, _ in turns) * m)


def push_sum_weights(plan: Parts) -> tuple[float, ...]:
    """Push-sum's ω of every worker, averaged over a period of a plan of messages that repeat.

    >>> import matcha
    >>> rounds = [[[(0, 1)]], [[(1, 0)]]]  # in turn: whoever has sent last holds less
    >>> plan = matcha.plan(matcha.families.path(2), 1.0, rounds=rounds, mixing="push")
    >>> [round(share, 6) for share in push_sum_weights(plan)]
    [1.0, 1.0]
    """
    period = plan.schedule.period
    assert period is not None  # rounds that are drawn have no period
    turns = push_turns(plan.matchings, period, plan.num_workers, plan.alpha, plan.weights)
    return tuple(cycle_weights(turns, plan.num_workers).tolist())


def cycle_weights(turns: Sequence[tuple[int, Array | None]], m: int) -> Array:
    """Push-sum's ω of every worker, averaged over the iterations of a cycle."""
    omega, total = _settled_weights(turns, m), np.zeros(m)
    for wait, W in turns:
        total += (wait - 1) * omega
        omega = omega if W is None else W @ omega
        total += omega
    mean: Array = total / sum(wait for wait, _ in turns)
    return mean


def _settled_weights(turns: Sequence[tuple[int, Array | None]], m: int) -> Array:
    """ω at the start of a cycle, once it repeats from cycle to cycle."""
    omega = np.ones(m)
    for _ in range(_SETTLING):
        before = omega
        for _, W in turns:
            omega = omega if W is None else W @ omega
        if float(np.abs(omega - before).max()) < 1e-14:
            break
    return omega


def _turns(
    matchings: Sequence[Matching],
    rounds: Sequence[tuple[int, ...]],
    mixing: Mixing,
    weights: Shares | None,
) -> list[Turn]:
    shares = weights or (None,) * len(matchings)
    known = [
        cycles.step(matching, some, push=mixing == "push")
        for matching, some in zip(matchings, shares, strict=True)
    ]
    return [
        (iterations, [known[j] for j in active if len(known[j].i)])
        for iterations, active in cycles.turns_of(rounds)
    ]
