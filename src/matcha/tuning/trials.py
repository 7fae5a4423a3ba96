"""Trials: the last word on a few plans, chosen so that few are needed.

How many iterations a target takes depends on a plan through the disagreement that it leaves, and on
little else; what an iteration takes is known. So every trial of one plan says something of all
others: iterations are taken as a chain of straight lines in the disagreement, from those that exact
averaging needs, and the plan that then looks quickest is tried next, until what is untried looks
slower.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from matcha.plans import Plan
from matcha.tuning.points import TunedPoint

MAX_TRIALS = 8
WORTH_A_TRIAL = 1.05
"""A plan that looks up to so much slower than the best that was tried is tried too: guesses err."""
_SLOPE = 0.05  # of the iterations, a unit of disagreement: a first guess, until a trial says more
_PATIENCE = 6.0  # times what exact averaging needs: what takes longer will not be chosen


class Trials(Protocol):
    """Real training: what `matcha.simulation.TaskTrials` does with a task."""

    @property
    def exact_iterations(self) -> float:
        """Iterations that exact averaging takes to the target: nearly the fewest."""

    def __call__(self, plan: Plan, limit: float, rate_factor: float = 1.0) -> float:
        """Iterations until the average model holds the target; infinite if not within a limit.

        Args:
            plan: to train by.
            limit: iterations.
            rate_factor: what the learning rate of exact averaging is multiplied by.
        """


def try_best(
    points: Sequence[TunedPoint],
    disagreements: Sequence[float],
    trials: Trials,
    max_trials: int,
    rate_factors: Sequence[float],
    on_trial: Callable[[int], object],
) -> list[TunedPoint]:
    """The points with measured iterations where they were tried, and inferred ones elsewhere.

    The best of them is tried at other learning rates too, outwards from 1 until they get worse.
    """
    exact, best = trials.exact_iterations, math.inf
    known, measured = [(0.0, exact)], dict[int, float]()
    while len(measured) < max_trials:
        guesses = {
            n: infer_iterations(disagreements[n], known) * point.iteration_seconds
            for n, point in enumerate(points)
            if n not in measured and math.isfinite(disagreements[n])
        }
        place = min(guesses, key=guesses.__getitem__, default=None)
        if place is None or guesses[place] >= WORTH_A_TRIAL * best:
            break
        point = points[place]
        limit = min(_PATIENCE * exact, best / point.iteration_seconds)
        needed = measured[place] = trials(point.plan, limit)
        best = min(best, needed * point.iteration_seconds)
        if point.outer is None:  # with outer steps it is no matter of disagreement alone
            # What was not reached within the limit takes longer, by an unknown amount.
            lesson = needed if math.isfinite(needed) else 1.5 * limit
            known.append((disagreements[place], lesson))
        on_trial(len(measured))
    found = []
    for n, point in enumerate(points):
        tried = n in measured
        needed = measured[n] if tried else infer_iterations(disagreements[n], known)
        factor = 1.0 if tried else None
        found.append(
            replace(point, iterations=needed, learning_rate=None, rate_factor=factor, tried=tried)
        )
    if math.isfinite(best):
        place = min(measured, key=lambda n: found[n].seconds)
        found[place] = _at_best_rate(found[place], trials, rate_factors)
    return found


def _at_best_rate(point: TunedPoint, trials: Trials, rate_factors: Sequence[float]) -> TunedPoint:
    """A plan that was tried, at the best multiple of the learning rate."""
    larger = sorted(f for f in rate_factors if f > 1)
    smaller = sorted((f for f in rate_factors if f < 1), reverse=True)
    for direction in (larger, smaller):
        for factor in direction:
            needed = trials(point.plan, point.iterations, rate_factor=factor)
            if not needed < point.iterations:
                break
            point = replace(point, iterations=needed, rate_factor=factor)
        if point.rate_factor != 1.0:
            break  # where a larger rate is better, a smaller one is not
    return point


def infer_iterations(disagreement: float, known: Sequence[tuple[float, float]]) -> float:
    """Iterations by straight lines between what is known, and beyond it by the whole chain's slope.

    >>> infer_iterations(2.0, [(0.0, 100.0)])
    110.0
    >>> infer_iterations(1.0, [(0.0, 100.0), (2.0, 160.0)])
    130.0
    """
    if not math.isfinite(disagreement):
        return math.inf
    left, iterations = np.array(sorted(known, key=lambda pair: pair[0]), dtype=float).T
    if disagreement < left[-1]:
        return float(np.interp(disagreement, left, iterations))
    slope = least = _SLOPE * iterations[0]
    if left[-1] > 0:  # not the last line's slope: two neighbours differ by luck too
        slope = max((iterations[-1] - iterations[0]) / left[-1], least / 10)
    return float(iterations[-1] + slope * (disagreement - left[-1]))
