"""One-peer schemes to measure `greedy` against: the exponential graph, and CECA with two models.

`matcha`'s own `ceca` sends its messages in one iteration; here gradients come between them, as in
DSGD-CECA, for which every worker keeps two models and applies each gradient to both.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from matcha.strategies.finite_time import ceca_hops
from matcha.strategies.strategy import timeline, unroll
from matcha.theory import cycles
from matcha.theory.cycles import Array


def one_peer_exponential(num_workers: int) -> tuple[Array, ...]:
    """The mixing matrices of the one-peer exponential graph: hop 2^t in round t, ½ (I + shift).

    Every worker sends to one peer and receives from another: directed, so not a matching, but as
    long as one where links carry both directions at once.

    >>> [float(W[0].max()) for W in one_peer_exponential(4)]
    [0.5, 0.5]
    """
    hops = max(1, math.ceil(math.log2(num_workers)))
    eye = np.eye(num_workers)
    return tuple((eye + np.roll(eye, 2**t % num_workers, axis=1)) / 2 for t in range(hops))


def one_peer_exponential_error(num_workers: int, rounds_per_iteration: float) -> float:
    """The steady-state consensus error of the one-peer exponential graph at a pace.

    >>> one_peer_exponential_error(8, 1.0)
    0.5
    """
    matrices = one_peer_exponential(num_workers)
    rate = Fraction(rounds_per_iteration).limit_denominator(1000)
    turn = Fraction(len(matrices)) / rate
    count = len(matrices) * min(turn.denominator, 256)
    numbers = unroll((wait, tuple(some)) for wait, some in timeline([Fraction(1)] * count, rate))
    noise = cycles.centering(num_workers)

    def advance(X: Array) -> tuple[Array, float]:
        total = 0.0
        for active in numbers:
            X = X + noise
            for n in active:
                W = matrices[n % len(matrices)]
                X = W @ X @ W.T
            total += float(np.trace(X))
        return X, total

    product = noise
    for n in range(count):
        product = matrices[n % len(matrices)] @ product
    fixed = cycles.lyapunov(product, advance(np.zeros_like(noise))[0])
    assert fixed is not None  # hop 1 alone connects everyone
    return advance(fixed)[1] / (len(numbers) * num_workers)


def two_model_ceca_error(num_workers: int) -> float:
    """The steady-state error of CECA with a gradient before every hop, at one hop an iteration.

    Of a worker's two models one averages the n workers before it and the other those and itself,
    which is the one that is trained. For a power of two it is the one-peer exponential graph.

    >>> two_model_ceca_error(8)
    0.5
    """
    m, count, matrices = num_workers, 0, []
    eye, nothing = np.eye(m), np.zeros((m, m))
    for hop in ceca_hops(m):
        shift, n = np.roll(eye, -hop, axis=1).T, count
        sent, size = ("whole", n + 1) if hop > n else ("behind", n)
        arriving = [nothing, shift] if sent == "whole" else [shift, nothing]
        behind = np.hstack([n * eye, nothing]) + size * np.hstack(arriving)
        whole = np.hstack([nothing, (n + 1) * eye]) + size * np.hstack(arriving)
        matrices.append(np.vstack([behind / (n + size), whole / (n + 1 + size)]))
        count += hop
    centre = cycles.centering(m)
    noise = np.block([[centre, centre], [centre, centre]])

    def advance(X: Array) -> tuple[Array, float]:
        total = 0.0
        for W in matrices:
            X = W @ (X + noise) @ W.T
            total += float(np.trace(X[m:, m:]))
        return X, total

    product = np.kron(np.eye(2), centre)
    for W in matrices:
        product = W @ product
    fixed = cycles.lyapunov(product, advance(np.zeros_like(noise))[0])
    assert fixed is not None  # exact after one turn
    return advance(fixed)[1] / (len(matrices) * m)
