"""The itinerary: where a worker is in a plan, and whom it meets there."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Protocol

from matcha.distributed.exchange import Meeting, meetings
from matcha.rounds import Round
from matcha.topology import Topology

__all__ = ["GossipPlan", "Itinerary"]

_KNOWN_ROUNDS = 1 << 14  # rounds repeat; beyond this many different ones, look again
_REST = Round(matchings=(), indices=(), mixing="pairwise", weight=0.5)


class GossipPlan(Protocol):
    """What the runtime needs of a plan; staged plans offer it too."""

    @property
    def topology(self) -> Topology: ...  # noqa: D102
    @property
    def num_workers(self) -> int: ...  # noqa: D102
    @property
    def digest(self) -> str: ...  # noqa: D102
    @property
    def seed(self) -> int: ...  # noqa: D102
    def rounds(self, start: int = 0, stop: int | None = None) -> Iterator[Round]: ...  # noqa: D102


class Itinerary:
    """One worker's way through a plan, a round at a time; a worker alone meets nobody.

    Attributes:
        iteration: of the round that comes next.
        round: that round.
        met: whom this worker meets in it; empty when it rests.
    """

    def __init__(self, plan: GossipPlan, rank: int, iteration: int, *, alone: bool = False) -> None:
        self._plan = plan
        self._alone = alone
        self._rank = rank
        self._known: dict[int, tuple[Round, tuple[Meeting, ...]]] = {}
        self.seek(iteration)

    def seek(self, iteration: int) -> None:
        """Go on at another iteration of the plan."""
        self.iteration = iteration - 1
        self._rounds = repeat(_REST) if self._alone else self._plan.rounds(iteration)
        self.advance()

    def advance(self) -> None:
        """Go on to the next round."""
        self.iteration += 1
        self.round = round = next(self._rounds)
        # By identity: plans hand out the same few objects, and hashing one's links takes long.
        known = self._known.get(id(round))
        if known is not None and known[0] is round:
            self.met = known[1]
            return
        self.met = meetings(round, self._rank)
        if len(self._known) < _KNOWN_ROUNDS:
            self._known[id(round)] = round, self.met
