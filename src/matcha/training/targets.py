"""Targets: when a series of losses reached one, and stayed there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def arrival(losses: Sequence[float], target: float) -> tuple[int, float] | None:
    """Where losses fall to a target and are still there at the next evaluation.

    One evaluation below the target may be luck, so two in a row are asked for.

    Returns:
        The first of the two, and how much of the way to it from the evaluation before had gone when
        a straight line meets the target; None where the target is never held.

    >>> arrival([3.0, 0.9, 2.0, 1.0, 0.5], 1.5)
    (3, 0.5)
    """
    for place, (first, second) in enumerate(pairwise(losses)):
        if first <= target and second <= target:
            before = losses[place - 1] if place else target
            return place, 1.0 if before <= target else (before - target) / (before - first)
    return None


def lowest_held(losses: Sequence[float]) -> float | None:
    """The lowest loss that two evaluations in a row were at or below; None without two.

    It is the lowest target with an `arrival`.

    >>> lowest_held([3.0, 1.0, 2.0, 1.5])
    2.0
    """
    return min(map(max, pairwise(losses)), default=None)
