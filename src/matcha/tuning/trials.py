"""Trials: the last word on a few plans, chosen so that few are needed.

How many iterations a target takes depends on a plan through the disagreement that it leaves, and on
little else; what an iteration takes is known. So every trial of one plan says something of all
others: iterations are taken as a chain of straight lines in the disagreement, from those that exact
averaging needs, and the plan that then looks quickest is tried next, until what is untried looks
slower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from matcha._numerics import ProgressCallback
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
    plans: Sequence[Plan],
    disagreements: Sequence[float],
    trials: Trials,
    *,
    max_trials: int = MAX_TRIALS,
    rate_factors: Sequence[float] = (1.0,),
    progress: ProgressCallback | None = None,
) -> list[TunedPoint]:
    """The points with measured iterations where they were tried, and inferred ones elsewhere.

    The best of them is tried at other learning rates too, outwards from 1 until they get worse.

    Args:
        points: as predicted; only their seconds per iteration matter here.
        plans: theirs.
        disagreements: theirs, in one unit.
        trials: what measures.
        max_trials: plans to try at most.
        rate_factors: multiples of the learning rate.
        progress: Called with (done, total, "trials at most") after each trial.
    """
    exact = trials.exact_iterations
    known = [(0.0, exact)]
    measured: dict[int, float] = {}
    best = math.inf
    while len(measured) < max_trials:
        guesses = {
            n: infer_iterations(disagreements[n], known) * point.iteration_seconds
            for n, point in enumerate(points)
            if n not in measured and math.isfinite(disagreements[n])
        }
        place = min(guesses, key=guesses.__getitem__, default=None)
        if place is None or guesses[place] >= WORTH_A_TRIAL * best:
            break
        each = points[place].iteration_seconds
        limit = min(_PATIENCE * exact, best / each)
        needed = trials(plans[place], limit)
        measured[place] = needed
        best = min(best, needed * each)
        # What was not reached within the limit takes longer, by an unknown amount.
        lesson = needed if math.isfinite(needed) else 1.5 * limit
        if plans[place].outer is None:  # with outer steps it is no matter of disagreement alone
            known.append((disagreements[place], lesson))
        if progress is not None:
            progress(len(measured), max_trials, "trials at most")
    found = []
    for n, point in enumerate(points):
        tried = n in measured
        needed = measured[n] if tried else infer_iterations(disagreements[n], known)
        seconds = needed * point.iteration_seconds
        found.append(
            replace(
                point,
                iterations=needed,
                seconds=seconds,
                learning_rate=None,
                rate_factor=1.0 if tried else None,
                tried=tried,
            )
        )
    if math.isfinite(best):
        place = min(measured, key=lambda n: measured[n] * points[n].iteration_seconds)
        found[place] = _at_best_rate(found[place], plans[place], trials, rate_factors)
    return found


def _at_best_rate(
    point: TunedPoint, plan: Plan, trials: Trials, rate_factors: Sequence[float]
) -> TunedPoint:
    """A plan that was tried, at the best multiple of the learning rate."""
    larger = sorted(f for f in rate_factors if f > 1)
    smaller = sorted((f for f in rate_factors if f < 1), reverse=True)
    for direction in (larger, smaller):
        for factor in direction:
            needed = trials(plan, point.iterations, rate_factor=factor)
            if not needed < point.iterations:
                break
            seconds = needed * point.iteration_seconds
            point = replace(point, iterations=needed, seconds=seconds, rate_factor=factor)
        if point.rate_factor != 1.0:
            break  # where a larger rate is better, a smaller one is not
    return point


def infer_iterations(disagreement: float, known: Sequence[tuple[float, float]]) -> float:
    """Iterations by straight lines between what is known, and beyond the last by the last's slope.

    >>> infer_iterations(2.0, [(0.0, 100.0)])
    110.0
    >>> infer_iterations(1.0, [(0.0, 100.0), (2.0, 160.0)])
    130.0
    """
    if not math.isfinite(disagreement):
        return math.inf
    ordered = sorted(known, key=lambda each: each[0])
    x, iterations = next(each for each in reversed(ordered) if each[0] <= disagreement)
    after = next((each for each in ordered if each[0] > disagreement), None)
    slope = _last_slope(ordered) if after is None else (after[1] - iterations) / (after[0] - x)
    return iterations + slope * (disagreement - x)


def _last_slope(ordered: Sequence[tuple[float, float]]) -> float:
    """Beyond what was tried: the whole chain's slope, for two neighbours differ by luck too."""
    (_, first), (disagreement, last) = ordered[0], ordered[-1]
    least = _SLOPE * first
    return least if disagreement <= 0 else max((last - first) / disagreement, least / 10)
