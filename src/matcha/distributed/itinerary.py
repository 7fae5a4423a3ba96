"""The itinerary: where a worker is in a plan, and whom it meets there."""

from __future__ import annotations

from functools import lru_cache
from itertools import repeat

from matcha.distributed.exchange import Meeting, meetings
from matcha.plans import PlanLike
from matcha.rounds import Round

__all__ = ["Itinerary"]

_KNOWN_ROUNDS = 1 << 14  # rounds repeat; beyond this many different ones, look again
_REST = Round(matchings=(), indices=(), mixing="pairwise", weight=0.5)


class Itinerary:
    """One worker's way through a plan, a round at a time; a worker alone meets nobody.

    Attributes:
        iteration: of the round that comes next.
        round: that round.
        met: whom this worker meets in it; empty when it rests.
    """

    def __init__(self, plan: PlanLike, rank: int, iteration: int, *, alone: bool = False) -> None:
        @lru_cache(maxsize=_KNOWN_ROUNDS)
        def met(round: Round) -> tuple[Meeting, ...]:
            return meetings(round, rank)

        self._plan = plan
        self._alone = alone
        self._met = met
        self.seek(iteration)

    def seek(self, iteration: int) -> None:
        """Go on at another iteration of the plan."""
        self.iteration = iteration - 1
        self._rounds = repeat(_REST) if self._alone else self._plan.rounds(iteration)
        self.advance()

    def advance(self) -> None:
        """Go on to the next round."""
        self.iteration += 1
        self.round = next(self._rounds)
        self.met = self._met(self.round)
