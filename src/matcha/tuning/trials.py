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
from dataclasses import dataclass, replace
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

    def __call__(self, plan: Plan, limit: float) -> float:
        """Iterations until the average model holds the target; infinite if not within a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What is known of iterations at some disagreement."""

    disagreement: float
    iterations: float


def try_best(
    points: Sequence[TunedPoint],
    plans: Sequence[Plan],
    disagreements: Sequence[float],
    trials: Trials,
    *,
    max_trials: int = MAX_TRIALS,
    progress: ProgressCallback | None = None,
) -> list[TunedPoint]:
    """The points with measured iterations where they were tried, and inferred ones elsewhere.

    Args:
        points: as predicted; only their seconds per iteration matter here.
        plans: theirs.
        disagreements: theirs, in one unit.
        trials: what measures.
        max_trials: plans to try at most.
        progress: Called with (done, total, "trials at most") after each trial.
    """
    exact = trials.exact_iterations
    known = [_Known(disagreement=0.0, iterations=exact)]
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
        known.append(_Known(disagreement=disagreements[place], iterations=lesson))
        if progress is not None:
            progress(len(measured), max_trials, "trials at most")
    return [
        _with_measured(point, measured[n])
        if n in measured
        else _with_inferred(point, infer_iterations(disagreements[n], known))
        for n, point in enumerate(points)
    ]


def infer_iterations(disagreement: float, known: Sequence[_Known]) -> float:
    """Iterations by straight lines between what is known, and beyond the last by the last's slope.

    >>> known = [_Known(disagreement=0.0, iterations=100.0)]
    >>> infer_iterations(2.0, known)
    110.0
    >>> infer_iterations(1.0, [*known, _Known(disagreement=2.0, iterations=160.0)])
    130.0
    """
    if not math.isfinite(disagreement):
        return math.inf
    ordered = sorted(known, key=lambda each: each.disagreement)
    below = [each for each in ordered if each.disagreement <= disagreement]
    above = [each for each in ordered if each.disagreement > disagreement]
    first = below[-1]
    if above:
        way = above[0].disagreement - first.disagreement
        slope = (above[0].iterations - first.iterations) / way
    else:
        slope = _last_slope(ordered)
    return first.iterations + slope * (disagreement - first.disagreement)


def _last_slope(ordered: Sequence[_Known]) -> float:
    """Beyond what was tried: the whole chain's slope, for two neighbours differ by luck too."""
    first, last = ordered[0], ordered[-1]
    least = _SLOPE * first.iterations
    if last.disagreement <= 0:
        return least
    return max((last.iterations - first.iterations) / last.disagreement, least / 10)


def _with_measured(point: TunedPoint, iterations: float) -> TunedPoint:
    seconds = iterations * point.iteration_seconds
    return replace(point, iterations=iterations, seconds=seconds, learning_rate=None, tried=True)


def _with_inferred(point: TunedPoint, iterations: float) -> TunedPoint:
    seconds = iterations * point.iteration_seconds
    return replace(point, iterations=iterations, seconds=seconds, learning_rate=None)
