"""What both ends of every link agree on before they meet: rotation, check weights, constants.

In numpy, so that the oracle in tests/wires/definition.py reads them too.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

FADE = 0.8
"""What a round leaves of a scale that nothing renews."""
FIRST = 1 / 64
"""The first scale as a share of a block's root mean square."""
LEAST = 1e-4
"""The first scale of a block of zeros."""
FINEST = 2.0**-20
"""The finest grid as a share of a block's root mean square: float32 has no more to say."""
DEPENDENT = 1e-4
"""A column that others explain but for this share of its length adds only rounding errors."""
ORDERS = 8
"""In how many orders a block's check may weigh its numbers."""
_TURN = 0x5749  # seed of the fixed signs


@cache
def hadamard(side: int) -> Array:
    """The Hadamard matrix of a power of two, scaled to be orthogonal.

    >>> (hadamard(2) * 2**0.5).round().tolist()
    [[1.0, 1.0], [1.0, -1.0]]
    """
    matrix = np.ones((1, 1))
    while len(matrix) < side:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]]) / math.sqrt(2)
    return matrix


@cache
def signs(block: int) -> Array:
    """The fixed random signs of a block, the same on every worker."""
    return np.random.default_rng(_TURN).choice([-1.0, 1.0], size=block)


@cache
def check_weights(block: int) -> Array:
    """Weights of a block's numbers in its check: different odd numbers, in a few orders (rows).

    A plain sum misses two numbers that wrap in opposite directions, one order of different weights
    four whose weights cancel: a block in a thousand that wraps. What a check misses once it would
    miss at every scale, and two workers would never meet there again. (Seen in training, with
    either: disagreement in a few blocks that no rate lowered.) So the order changes from meeting
    to meeting, see `modulo.orders`.
    """
    random = np.random.default_rng(_TURN)
    return np.stack([random.permutation(2.0 * np.arange(block) + 1) for _ in range(ORDERS)])


def orthonormal(p: Array) -> Array:
    """A matrix's columns made orthonormal one after another; what depends on others becomes 0."""
    q: Array = p.copy()
    for c in range(q.shape[1]):
        before = np.sqrt((q[:, c] ** 2).sum())
        q[:, c] -= q[:, :c] @ (q[:, :c].T @ q[:, c])
        length = np.sqrt((q[:, c] ** 2).sum())
        q[:, c] = q[:, c] / length if length > DEPENDENT * before else 0
    return q


def first_direction(columns: int, rank: int) -> Array:
    """Where power iteration starts on every link."""
    return orthonormal(np.random.default_rng(_TURN).normal(size=(columns, rank)))
