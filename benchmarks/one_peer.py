"""The one-peer exponential graph: directed rounds to measure `greedy` against."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from matcha.strategies.pacing import timeline, unrolled
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
    numbers = unrolled((wait, tuple(some)) for wait, some in timeline([Fraction(1)] * count, rate))
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
