"""Steady states by brute force: matrices multiplied, covariances iterated."""

from __future__ import annotations

import numpy as np

from matcha import families
from matcha.rounds import Round, RoundProcess


def process(matchings, schedule, m, mixing, alpha):
    """Rounds on a complete graph, which has whatever links they use."""
    return RoundProcess(
        topology=families.complete(m),
        matchings=tuple(matchings),
        schedule=schedule,
        mixing=mixing,
        alpha=alpha,
    )


def matrix(matchings, active, m, mixing, weight):
    """W of a round in which some matchings are active."""
    return Round(
        matchings=tuple(matchings[j] for j in active),
        indices=tuple(active),
        mixing=mixing,
        weight=weight,
    ).matrix(m)


def iterate(step, m, count=4000, tail=1):
    """tr(X)/m after many steps of X ← step(k, X + I − J), averaged over the last ones."""
    X, total = np.zeros((m, m)), 0.0
    noise = np.eye(m) - 1 / m
    for k in range(count):
        X = step(k, X + noise)
        total += np.trace(X) if k >= count - tail else 0.0
    return total / tail / m
