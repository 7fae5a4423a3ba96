"""Rounds that repeat: the workers' steady disagreement, averaged over a period, and its decay."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from matcha.rounds import RoundProcess
from matcha.schedules import Active
from matcha.theory import cycles
from matcha.theory.cycles import Array, Turn

_SETTLING = 10_000  # cycles until ω repeats; it contracts like everything else


def cycle_error(process: RoundProcess) -> float:
    """tr(X)/m averaged over a period; infinite where it never settles."""
    m, period = process.num_workers, period_of(process)
    if process.needs_push_sum:
        return push_sum_error(push_turns(process), m)
    if process.mixing != "laplacian" and not process.is_exact:
        turns = _turns(process)
        # Without a path between some workers nothing settles; rounding must not hide it.
        joined = cycles.connects(turns, m)
        state = cycles.steady_state(turns, m, process.alpha) if joined else None
        return math.inf if state is None else state.error
    matrices = mixing_matrices(process)
    if len(matrices) == 1:
        return _commuting_error(period, next(iter(matrices.values())), m)
    noise = cycles.centering(m)

    def advance(X: Array) -> tuple[Array, float]:
        total = 0.0
        for active in period:
            X = X + noise
            if active:
                W = matrices[active]
                X = W @ X @ W
            total += float(np.trace(X))
        return X, total

    product = _product(matrices, period, m)
    fixed = cycles.lyapunov(product, advance(np.zeros((m, m)))[0])
    return math.inf if fixed is None else advance(fixed)[1] / (len(period) * m)


def cycle_drift(process: RoundProcess) -> float:
    """The disagreement that gradients with fixed differences cause, averaged over a period."""
    m, period = process.num_workers, period_of(process)
    made, noise = mixing_matrices(process), cycles.centering(m)
    matrices = [made.get(active) for active in period]

    def advance(X: Array, C: Array) -> tuple[Array, Array, float]:
        total = 0.0
        for W in matrices:
            X = X + noise + C + C.T
            C = C + noise
            if W is not None:
                X, C = W @ X @ W.T, W @ C
            total += float(np.trace(X))
        return X, C, total

    zero, product = np.zeros((m, m)), _product(made, period, m)
    if float(np.linalg.norm(product, 2)) > 1 - 1e-12:
        return math.inf
    C: Array = np.linalg.solve(np.eye(m) - product, advance(zero, zero)[1]).astype(np.float64)
    X = cycles.lyapunov(product, advance(zero, C)[0])
    return math.inf if X is None else advance(X, C)[2] / (len(period) * m)


def _commuting_error(period: Sequence[Active], W: Array, m: int) -> float:
    """One symmetric W in all active rounds: every eigenvector of W evolves alone."""
    shrink = np.linalg.eigvalsh(W - 1 / m) ** 2
    # J's own direction carries no disagreement; W − J maps it to 0, so drop one zero.
    shrink = np.delete(shrink, int(np.argmin(shrink)))
    if shrink.max() > 1 - 1e-12:
        return math.inf
    state, factor = np.zeros(m - 1), np.ones(m - 1)
    for active in period:
        state += 1
        if active:
            state *= shrink
            factor *= shrink
    state /= 1 - factor
    total = 0.0
    for active in period:
        state += 1
        if active:
            state *= shrink
        total += float(state.sum())
    return total / (len(period) * m)


def cycle_contraction(process: RoundProcess) -> float:
    """ρ of rounds that repeat: ‖Φ − J‖^(2 / length), Φ the product of their mixing matrices."""
    m, period = process.num_workers, period_of(process)
    if process.mixing != "laplacian" and not process.is_exact:
        return cycles.contraction(_turns(process), m, process.alpha)
    matrices = mixing_matrices(process)
    steps = (matrices[active] for active in period if active)
    return cycles.rescaled_contraction((step.__matmul__ for step in steps), m, len(period))


def _product(matrices: dict[Active, Array], period: Sequence[Active], m: int) -> Array:
    """Φ − J, what a whole cycle leaves of a disagreement."""
    product = cycles.centering(m)
    for active in period:
        if active:
            product = matrices[active] @ product
    return product


def period_of(process: RoundProcess) -> tuple[Active, ...]:
    """The rounds of one period, of a process whose rounds repeat."""
    period = process.schedule.period
    assert period is not None  # rounds that are drawn have no period
    return period


def mixing_matrices(process: RoundProcess) -> dict[Active, Array]:
    """W of every distinct round in which some workers talk."""
    distinct = set(period_of(process))
    m = process.num_workers
    return {active: process.round_of(active).matrix(m) for active in distinct if active}


def push_turns(process: RoundProcess) -> list[tuple[int, Array | None]]:
    """A cycle of messages as stretches of iterations, each with the matrix of its last round."""
    made = mixing_matrices(process)
    turns = cycles.turns_of(period_of(process))
    return [(wait, made.get(tuple(active))) for wait, active in turns]


def push_sum_error(turns: Sequence[tuple[int, Array | None]], m: int) -> float:
    """The error of push-sum, whose columns alone sum to one, over a cycle of rounds.

    With ω the weights and u = x − ω·(1ᵀx/m), a round maps u to Wu and ω to Wω, and what workers
    hold differs from the average by u/ω. Unit noise enters u without its part along ω.
    """
    transition, omega = np.eye(m), _steady_weights(turns, m)
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


def push_sum_weights(process: RoundProcess) -> tuple[float, ...]:
    """Push-sum's ω of every worker, averaged over a period of messages that repeat.

    >>> import matcha
    >>> from matcha.strategies import Rounds
    >>> rounds = [[[(0, 1)]], [[(1, 0)]]]  # in turn: the last sender holds less
    >>> plan = matcha.plan(matcha.families.path(2), 1.0, Rounds(rounds=rounds, mixing="push"))
    >>> [round(share, 6) for share in push_sum_weights(plan.process)]
    [1.0, 1.0]
    """
    return tuple(cycle_weights(push_turns(process), process.num_workers).tolist())


def cycle_weights(turns: Sequence[tuple[int, Array | None]], m: int) -> Array:
    """Push-sum's ω of every worker, averaged over the iterations of a cycle."""
    omega, total = _steady_weights(turns, m), np.zeros(m)
    for wait, W in turns:
        total += (wait - 1) * omega
        omega = omega if W is None else W @ omega
        total += omega
    mean: Array = total / sum(wait for wait, _ in turns)
    return mean


def _steady_weights(turns: Sequence[tuple[int, Array | None]], m: int) -> Array:
    """ω at the start of a cycle, once it repeats from cycle to cycle."""
    omega = np.ones(m)
    for _ in range(_SETTLING):
        before = omega
        for _, W in turns:
            omega = omega if W is None else W @ omega
        if float(np.abs(omega - before).max()) < 1e-14:
            break
    return omega


def _turns(process: RoundProcess) -> list[Turn]:
    shares = process.weights or (None,) * len(process.matchings)
    known = [
        cycles.step(matching, some, push=process.mixing == "push")
        for matching, some in zip(process.matchings, shares, strict=True)
    ]
    return [
        (iterations, [known[j] for j in active if len(known[j].i)])
        for iterations, active in cycles.turns_of(period_of(process))
    ]
