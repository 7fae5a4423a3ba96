"""Degrees: how many links of one worker are active at once, in rounds that really happen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import repeat

import numpy as np
import numpy.typing as npt

from matcha.rounds import Shares
from matcha.schedules import Schedule
from matcha.topology import Matching

RARE = 1e-6
"""Once in as many iterations as a long training has; what comes less often does not count."""


def given_away(
    schedule: Schedule, matchings: Sequence[Matching], weights: Shares | None = None
) -> float:
    """The most links that a worker has at once, or the most that they weigh.

    Of rounds that are drawn, those count that come at least once in a million iterations.
    """
    if schedule.period is not None or schedule.exclusive:
        rounds = schedule.largest
        return max(
            (max(_sums(r, matchings, weights).values(), default=0) for r in rounds), default=0
        )
    if weights is not None:  # sums of unlike weights have no short table of how often each comes
        likely = tuple(j for p, members in schedule.coins if p >= RARE for j in members)
        return max(_sums(likely, matchings, weights).values(), default=0)
    often: dict[int, npt.NDArray[np.float64]] = {}  # by worker: of 0, 1, … active links
    for p, members in schedule.coins:
        for worker, links in _sums(members, matchings, None).items():
            heads = np.zeros(int(links) + 1)
            heads[0], heads[-1] = 1 - p, p
            often[worker] = np.convolve(often.get(worker, np.ones(1)), heads)
    tails = (np.cumsum(counts[::-1])[::-1] for counts in often.values())
    return max((int(np.flatnonzero(tail >= RARE)[-1]) for tail in tails), default=0)


def _sums(
    active: Sequence[int], matchings: Sequence[Matching], weights: Shares | None
) -> dict[int, float]:
    """Each worker's active links, counted or weighed."""
    given: dict[int, float] = defaultdict(float)
    for j in active:
        shares = repeat(1.0) if weights is None else weights[j]
        for link, w in zip(matchings[j], shares, strict=False):
            for worker in link:
                given[worker] += w
    return given
