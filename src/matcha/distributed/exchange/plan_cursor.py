"""The plan cursor: where a worker is in a plan, and whom it meets there."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import repeat

from matcha.distributed.exchange.meeting import Meeting, meetings
from matcha.plans import Plan, PlanLike, StagedPlan
from matcha.rounds import Round

__all__ = ["PlanCursor"]

_KNOWN_ROUNDS = 1 << 14  # rounds repeat; beyond this many different ones, look again
_NEVER = 1e-6  # a matching that is active more rarely is not waited for
_REST = Round(matchings=(), indices=(), mixing="pairwise", weight=0.5)


class PlanCursor:
    """One worker's position in a plan, round by round; a worker alone has no meetings.

    Attributes:
        iteration: of the round that comes next.
        round: that round.
        met: this worker's meetings in it; empty when it rests.
        passed: workers that it does not meet any more.
    """

    def __init__(self, plan: PlanLike, rank: int, iteration: int, *, alone: bool = False) -> None:
        @lru_cache(maxsize=_KNOWN_ROUNDS)
        def met(round: Round) -> tuple[Meeting, ...]:
            return meetings(round, rank)

        self._plan = plan
        self._rank = rank
        self._alone = alone
        self.passed: set[int] = set()
        self._met = met
        self._peers = [_peers_of(level, rank) for level in plan.levels]
        self.seek(iteration)

    def seek(self, iteration: int) -> None:
        """Go on at another iteration of the plan."""
        self.iteration = iteration - 1
        self._rounds = repeat(_REST) if self._alone else self._plan.rounds(iteration)
        self.advance()

    def follow(self, plan: PlanLike) -> None:
        """Go on by another plan from the round that comes next."""
        self._plan = plan
        self._peers = [_peers_of(level, self._rank) for level in plan.levels]
        self.seek(self.iteration)

    def partners(self) -> set[int]:
        """Return the workers that this one meets in some round from the current one on."""
        if not isinstance(self._plan, StagedPlan):
            return set().union(*self._peers)
        stages = self._plan.stages
        current = bisect_right([stage.start for stage in stages], self.iteration) - 1
        return set().union(*(self._peers[stage.level] for stage in stages[current:]))

    def advance(self) -> None:
        """Go on to the next round."""
        self.iteration += 1
        self.round = next(self._rounds)
        self.met = self._met(self.round)
        if self.passed:
            self.met = tuple(meeting for meeting in self.met if meeting.peer not in self.passed)


def _peers_of(level: Plan, rank: int) -> set[int]:
    """The workers that a plan of one stage ever pairs with this one."""
    used = (m for m, p in zip(level.matchings, level.probabilities, strict=True) if p > _NEVER)
    return {i + j - rank for matching in used for i, j in matching if rank in (i, j)}
