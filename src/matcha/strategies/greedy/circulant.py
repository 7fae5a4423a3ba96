"""Hops: rounds in which each worker sends to the one a fixed number of places further on.

On a complete graph, or any graph that has the links, such rounds are circulant matrices: they share
their eigenvectors, so a cycle's error is a sum of products of a few numbers, and hops can be tried
by the thousand. The one-peer exponential graph hops 1, 2, 4, …; other hops are often better where
the number of workers is no power of two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from matcha.strategies.parts import timeline
from matcha.topology import Topology

Array = npt.NDArray[np.float64]
_MOST_STEPS = 64
_TRIES = 4


def possible_hops(topology: Topology) -> tuple[int, ...]:
    """The hops h for which every worker i has a link to i + h."""
    m, arrows = topology.num_workers, set(topology.arrows)
    return tuple(h for h in range(1, m) if all((i, (i + h) % m) in arrows for i in range(m)))


def hops_error(hops: npt.NDArray[np.int64], num_workers: int, rate: Fraction) -> Array:
    """The steady-state errors of cycles of hops (rows), at some rounds per iteration, weight ½.

    >>> round(float(hops_error(np.array([[1, 2, 4]]), 8, Fraction(1))[0]), 6)
    0.5
    """
    length, m = hops.shape[1], num_workers
    count = length * min((Fraction(length) / rate).denominator, max(1, _MOST_STEPS // length))
    turns = timeline([Fraction(1)] * count, rate)
    k = np.arange(1, m)
    # |½ + ½ exp(2πi hk/m)|² for each hop h and each wave k.
    shrink = np.cos(np.pi * np.outer(np.arange(m), k) / m) ** 2
    steps = [shrink[hops[:, n % length]] for n in range(count)]
    state, factor = np.zeros((len(hops), m - 1)), np.ones((len(hops), m - 1))
    for wait, numbers in turns:
        state += wait
        for n in numbers:
            state *= steps[n]
            factor *= steps[n]
    state /= np.maximum(1 - factor, 1e-300)
    total, iterations = np.zeros(len(hops)), 0
    for wait, numbers in turns:
        total += (wait - 1) * state.sum(axis=1) + (m - 1) * wait * (wait - 1) / 2
        state += wait
        for n in numbers:
            state *= steps[n]
        total += state.sum(axis=1)
        iterations += wait
    error: Array = total / (iterations * m)
    return np.where(factor.max(axis=1) < 1 - 1e-12, error, np.inf)


def best_hops(
    num_workers: int, options: Sequence[int], rate: Fraction, *, seed: int = 0
) -> tuple[int, ...]:
    """A short cycle of hops with a low error: one hop at a time is replaced by the best one."""
    rng, m = np.random.default_rng(seed), num_workers
    choices = np.array(options, dtype=np.int64)
    least = max(1, math.ceil(math.log2(m)))
    best, best_error = np.array([choices[:1]]), math.inf
    for length in range(least, min(2 * least, 10) + 1):
        for attempt in range(_TRIES):
            start = np.array([2 ** (t % least) for t in range(length)])
            if attempt or not np.isin(start, choices).all():
                start = rng.choice(choices, length)
            hops, error = _descend(start, choices, m, rate)
            if error < best_error * (1 - 1e-9):
                best, best_error = hops, error
    return tuple(int(h) for h in best.ravel())


def _descend(
    hops: npt.NDArray[np.int64], choices: npt.NDArray[np.int64], m: int, rate: Fraction
) -> tuple[npt.NDArray[np.int64], float]:
    error = float(hops_error(hops[None], m, rate)[0])
    for _ in range(20):
        before = error
        for place in range(len(hops)):
            tried = np.repeat(hops[None], len(choices), axis=0)
            tried[:, place] = choices
            errors = hops_error(tried, m, rate)
            if errors.min() < error * (1 - 1e-9):
                hops, error = tried[int(errors.argmin())], float(errors.min())
        if error >= before * (1 - 1e-9):
            break
    return hops, error
