"""Clipping: how far one meeting may move a worker, so that a faulty or hostile worker does little.

A plan predicts how far apart workers are when they meet: with c its consensus error under unit
noise per iteration, n iterations between a worker's meetings, and r² the squared length of the way
that a worker goes between two of them, E‖x_i − x_j‖² = 2(1 + c/n) r². A meeting moves its ends by
at most `clip` times that length, times its weight. Both ends take the smaller of their two r, so
honest ends move by exactly opposite amounts and the average is kept; a worker that lies about r can
only make its own meetings do less.
"""

from __future__ import annotations

import math

from matcha.errors import InputError
from matcha.plans import Plan, PlanLike

_FORGETS = 0.9  # of r² a meeting: the way grows shorter as learning rates fall


def allowance(plan: PlanLike, clip: float) -> float:
    """The longest difference that a meeting acts on, over r; in stages, the largest of theirs.

    >>> import matcha
    >>> round(allowance(matcha.plan(matcha.families.complete(4), 1.0, "greedy"), 1.0), 2)
    1.41
    """
    check_clip(clip)
    if any(level.mixing in ("push", "average", "relay") for level in plan.levels):
        raise InputError("clip= bounds what two workers do to each other: it needs meetings.")
    return clip * max(_apart(level) for level in plan.levels)


def check_clip(clip: float) -> None:
    """Refuse a clip that bounds nothing."""
    if not (math.isfinite(clip) and clip > 0):
        raise InputError(f"clip is {clip!r}, but it is a positive number, such as 1.")


def _apart(level: Plan) -> float:
    """The predicted distance of two workers that meet, over the way that each went meanwhile."""
    links = sum(
        p * len(matching) for p, matching in zip(level.probabilities, level.matchings, strict=True)
    )
    between = level.num_workers / (2 * links) if links else math.inf
    error = level.consensus_error
    if error is None:
        error = level.rho / (1 - level.rho) if level.rho < 1 else math.inf
    return math.sqrt(2 * (1 + error / between)) if math.isfinite(error) else math.inf


def renewed_reach(reach: float, moved: float) -> float:
    """Update r² after another stretch between meetings: the longest recent one."""
    return max(moved, _FORGETS * reach)


def kept_share(length: float, limit: float) -> float:
    """The share of a move that is kept: all within the limit, none if it is not finite.

    >>> kept_share(4.0, 1.0), kept_share(0.5, 1.0), kept_share(math.inf, 1.0)
    (0.25, 1.0, 0.0)
    """
    if not math.isfinite(length):
        return 0.0
    return 1.0 if length <= limit else limit / length
