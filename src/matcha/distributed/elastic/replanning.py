"""Replanning: a plan that follows the network, made anew where links take other times.

Every so many iterations all workers tell each other how long meetings took. Where a link is off by
half from what the plan was made for, every worker makes the next stage from the same times, beside
training. At an iteration that all name alike they compare its digest and change to it together.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from matcha.distributed.collectives import gather
from matcha.distributed.elastic.drafts import Draft
from matcha.distributed.exchange.link_times import LinkTimes
from matcha.distributed.probe import exchange_time
from matcha.distributed.seats import Seat
from matcha.errors import PeerLostError
from matcha.plans import Plan, PlanLike, StagedPlan
from matcha.strategies.staged import in_stages, is_off
from matcha.topology import Link

__all__ = ["Replanning"]

_log = logging.getLogger("matcha.links")
_TRIFLE = 0.1  # of an iteration's time: what a link must make of a difference to matter
_AHEAD = 10.0  # seconds of training after which a stage is in force: planning is over by then
_MOST_PROBED = 250_000  # bytes: looking must cost less than what it may save


class Replanning:
    """One worker's part in following the network.

    Args:
        plan: what was asked for; it stays the plan until links turn out to be otherwise.
        every: iterations after which workers tell each other what links took; 0 is never.
        seat: how all are reached.
        values: what is exchanged, for the size of a message.
        deadline: seconds to wait for anybody.

    Attributes:
        given: the plan as it was asked for.
        plan: what is in force: as given, or in stages.
        times: of this worker's links.
    """

    def __init__(
        self,
        plan: PlanLike,
        every: int,
        seat: Seat,
        values: Sequence[torch.Tensor],
        deadline: float,
    ) -> None:
        self.plan = self.given = plan
        self.every = every
        self.times = LinkTimes()
        self._seat, self._deadline = seat, deadline
        self._bytes = sum(value.nbytes for value in values) * plan.wire.size_ratio()
        self._asked_at = 0
        self._draft: Draft | None = None
        self._since = time.perf_counter()

    # -- what travels with a worker's state --------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The stages made so far, the one being made, and when times travelled last."""
        stages = None if self.plan is self.given else self.plan.to_json()
        draft = None if self._draft is None else self._draft.to_json()
        return {"asked_at": self._asked_at, "stages": stages, "draft": draft}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on with the stages of another worker or of a checkpoint."""
        stages = state["stages"]
        self._asked_at = int(state["asked_at"])
        self.plan = self.given if stages is None else StagedPlan.from_json(stages)
        self.close()
        draft = state.get("draft")  # checkpoints from before it was there have none
        if draft is not None and self.every:
            self._begin({(i, j): s for i, j, s in draft["links"]}, int(draft["due"]))

    def close(self) -> None:
        """Leave a stage that is being made."""
        if self._draft is not None:
            self._draft.drop()
            self._draft = None

    # -- every so often ----------------------------------------------------------------------------

    def look(self, iteration: int) -> bool:
        """Before an iteration's round: whether another plan is in force from it on. Collective."""
        if self._draft is not None and iteration >= self._draft.due:
            return self._change(iteration)
        if not self.every or iteration % self.every or iteration <= self._asked_at:
            return False
        seconds, usual = self._told(iteration)
        self._asked_at = iteration
        if seconds is None:
            _log.info("iteration %d: the plan stays while a worker is away", iteration)
        elif is_off(self.plan.level_at(iteration), seconds, least=_TRIFLE * usual):
            ahead = math.ceil(_AHEAD / max(usual, 1e-6))
            self._begin(seconds, iteration + min(self.every, ahead))
        return False

    def _begin(self, seconds: Mapping[Link, float], due: int) -> None:
        first = self.given
        assert isinstance(first, Plan)
        self._draft = Draft(first, seconds, due)

    def _change(self, iteration: int) -> bool:
        """Where all hold the same stage, go on by it."""
        draft, self._draft = self._draft, None
        assert draft is not None
        assert isinstance(self.plan, Plan | StagedPlan)
        self._asked_at = iteration  # what was timed before says nothing of the new stage
        self.times.take()
        longer = in_stages(self.plan).then(iteration, draft.made())
        digests = gather(self._seat.everyone, longer.digest.encode(), self._deadline)
        if len(digests) < self._seat.everyone.num_workers or len(set(digests)) > 1:
            # Somebody was lost meanwhile, or a machine rounds an eigenvalue otherwise.
            _log.warning("iteration %d: no agreement on a new stage; the plan stays", iteration)
            return False
        self._report(longer, draft.seconds)
        self.plan = longer
        self._since = time.perf_counter()
        return True

    def _told(self, iteration: int) -> tuple[dict[Link, float] | None, float]:
        """What every link's meetings take, and an iteration; nothing where somebody is missing."""
        now = time.perf_counter()
        pace = (now - self._since) / max(1, iteration - self._asked_at)
        answers = self._gather({"links": self._by_link(self.times.take()), "pace": pace})
        found = _slowest(answers)
        complete = len(answers) == self._seat.everyone.num_workers
        idle = [link for link in self.plan.topology.links if link not in found]
        if idle and complete:
            found |= _slowest(self._gather({"links": self._probed(idle)}))
        self._since = time.perf_counter()
        usual = sum(answer["pace"] for answer in answers) / len(answers)
        return (found if complete else None), usual

    def _gather(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        content = json.dumps(mine).encode()
        return [json.loads(a) for a in gather(self._seat.everyone, content, self._deadline)]

    def _by_link(self, seconds: Mapping[int, float]) -> list[tuple[Link, float]]:
        rank = self._seat.transport.rank
        return [((min(rank, peer), max(rank, peer)), s) for peer, s in seconds.items()]

    def _probed(self, idle: Sequence[Link]) -> list[tuple[Link, float]]:
        """Time links that the plan does not use, so that one that recovers is noticed.

        All take them in one order, so none waits in a circle.
        """
        transport, found = self._seat.transport, {}
        size = max(1, min(_MOST_PROBED, int(self._bytes)))
        for i, j in idle:
            if transport.rank in (i, j):
                peer = i + j - transport.rank
                try:
                    seconds = exchange_time(transport, peer, size, 1, self._deadline)
                except PeerLostError:  # whose link is gone is not planned for here
                    continue
                found[peer] = seconds * max(1.0, self._bytes / size)
        return self._by_link(found)

    def _report(self, longer: StagedPlan, seconds: Mapping[Link, float]) -> None:
        level, start = longer.levels[-1], longer.stages[-1].start
        slow = max(seconds, key=lambda link: seconds[link])
        _log.info(
            "iteration %d: a new stage for links as they are: %d–%d is the slowest with %.3g s, "
            "and %.3g s of communication an iteration are planned",
            start, *slow, seconds[slow], level.expected_comm_time,
        )  # fmt: skip


def _slowest(answers: Sequence[Mapping[str, Any]]) -> dict[Link, float]:
    """Each link's seconds as the end saw it that saw all of it."""
    found: dict[Link, float] = {}
    for answer in answers:
        for (i, j), seconds in answer["links"]:
            found[i, j] = max(seconds, found.get((i, j), 0.0))
    return dict(sorted(found.items()))
