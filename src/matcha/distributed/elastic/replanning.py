"""Replanning: a plan that follows the network, planned again where links take other times.

Every so many iterations all workers tell each other how long meetings took. Where a link is off by
half from what the plan was made for, the lowest living worker plans the next stage from these
times, beside training. At an iteration that all have computed alike it sends the stage to all, and
they change to it together.
"""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from matcha.distributed.elastic.probe import exchange_time
from matcha.distributed.exchange.hooks import LinkTimes
from matcha.distributed.launch.placement import Placement
from matcha.distributed.transports.collectives import gather
from matcha.errors import MatchaError, PeerLostError
from matcha.plans import Plan, PlanLike, StagedPlan
from matcha.strategies.planning import in_stages, is_off, next_level
from matcha.topology import Link

_log = logging.getLogger("matcha.links")
_TRIFLE = 0.1  # of an iteration's time: what a link must make of a difference to matter
_AHEAD = 10.0  # seconds of training after which a stage is in force: planning is over by then
_MAX_PROBED = 250_000  # bytes: looking must cost less than what it may save
_ANSWER = "import os; os.nice(5); from matcha.strategies.planning import answer; answer()"


class Planner:
    """Plans the next stage in a process of its own, with less priority than training.

    Planning takes seconds of Python, which a thread would take from the training loop.
    """

    def __init__(self, first: Plan, seconds: Mapping[Link, float]) -> None:
        self._first, self._seconds = first, seconds
        self._answer = tempfile.TemporaryFile()  # noqa: SIM115  # open until it is read
        with tempfile.TemporaryFile() as question:
            links = [[*link, s] for link, s in seconds.items()]
            question.write(json.dumps([first.to_json(), links]).encode())
            question.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-c", _ANSWER],
                stdin=question,
                stdout=self._answer,
                stderr=subprocess.DEVNULL,
            )

    def plan(self) -> Plan:
        """The stage's plan; waits for it, and plans here where the process failed."""
        with self._answer as file:
            if self._process.wait() == 0:
                file.seek(0)
                return Plan.from_json(json.load(file))
        _log.info("planning in a process of its own failed; planning here")
        return next_level(self._first, self._seconds)

    def close(self) -> None:
        """Stop planning."""
        self._process.kill()
        self._process.wait()
        self._answer.close()


class Replanning:
    """One worker's part in following the network.

    Every `every` iterations workers tell each other what links took; 0 is never. Of `values` the
    size of a message counts. `plan` is in force: as given, or in stages.
    """

    def __init__(
        self,
        plan: PlanLike,
        every: int,
        placement: Placement,
        values: Sequence[torch.Tensor],
        timeout: Callable[[], float],
    ) -> None:
        self.plan = self.given = plan
        self.every = every
        self.times = LinkTimes()
        self._transport, self._everyone = placement.transport, placement.everyone
        self._timeout = timeout
        self._bytes = sum(value.nbytes for value in values) * plan.wire.size_ratio()
        self._asked_at = 0
        self._next: tuple[dict[Link, float], int] | None = None  # links' seconds, and when
        self._planner: Planner | None = None
        self._since = time.perf_counter()

    # -- what travels with a worker's state --------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The stages made so far, the one being made, and when times travelled last."""
        stages, coming = None if self.plan is self.given else self.plan.to_json(), None
        if self._next is not None:
            seconds, due = self._next
            coming = {"due": due, "links": [[*link, s] for link, s in seconds.items()]}
        return {"asked_at": self._asked_at, "stages": stages, "draft": coming}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on with the stages of another worker or of a checkpoint."""
        stages = state["stages"]
        self._asked_at = int(state["asked_at"])
        self.plan = self.given if stages is None else StagedPlan.from_json(stages)
        self.close()
        coming = state.get("draft")  # checkpoints from before it was there have none
        if coming is not None and self.every:
            self._begin({(i, j): s for i, j, s in coming["links"]}, int(coming["due"]))

    def close(self) -> None:
        """Drop a stage that is being planned."""
        self._next = None
        if self._planner is not None:
            self._planner.close()
            self._planner = None

    # -- every so often ----------------------------------------------------------------------------

    def look(self, iteration: int) -> bool:
        """Before an iteration's round: whether another plan is in force from it on. Collective."""
        if self._next is not None and iteration >= self._next[1]:
            return self._change(iteration, self._next[0])
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
        self._next = dict(seconds), due
        if self._is_planner():
            assert isinstance(self.given, Plan)
            self._planner = Planner(self.given, seconds)

    def _is_planner(self) -> bool:
        return self._everyone.rank == self._everyone.members[0]

    def _change(self, iteration: int, seconds: Mapping[Link, float]) -> bool:
        """Where all workers are there, go on by the stage that the lowest one planned."""
        planner, self._planner, self._next = self._planner, None, None
        assert isinstance(self.plan, Plan | StagedPlan)
        self._asked_at = iteration  # what was timed before says nothing about the new stage
        self.times.take()
        mine = b""
        if planner is not None or self._is_planner():  # else the one that planned may be gone
            mine = self._planned(planner, seconds)
        found = gather(self._everyone, mine, self._timeout())
        planned = next(filter(None, found), None)
        if len(found) < self._everyone.num_workers or planned is None:
            why = "no stage could be planned" if planned is None else "a worker is away"
            _log.warning("iteration %d: %s; the plan stays", iteration, why)
            return False
        try:
            level = Plan.from_json(json.loads(planned))
            self.plan = in_stages(self.plan).with_stage(iteration, level)
        except (MatchaError, ValueError, TypeError, LookupError) as error:
            text = "iteration %d: the stage cannot be used; the plan stays: %s"
            _log.warning(text, iteration, error)
            return False
        slow = max(seconds, key=lambda link: seconds[link])
        _log.info(
            "iteration %d: a new stage for links as they are: %d–%d is the slowest with %.3g s, "
            "and %.3g s of communication an iteration are planned",
            iteration, *slow, seconds[slow], level.expected_comm_time,
        )  # fmt: skip
        self._since = time.perf_counter()
        return True

    def _planned(self, planner: Planner | None, seconds: Mapping[Link, float]) -> bytes:
        """The next stage as it is sent; empty where none can be made: all others wait for it."""
        try:
            assert isinstance(self.given, Plan)
            plan = next_level(self.given, seconds) if planner is None else planner.plan()
        except Exception as error:
            _log.warning("the next stage cannot be planned: %s", error)
            return b""
        return json.dumps(plan.to_json()).encode()

    def _told(self, iteration: int) -> tuple[dict[Link, float] | None, float]:
        """What every link takes, or None if a worker is missing, and what an iteration takes."""
        now = time.perf_counter()
        pace = (now - self._since) / max(1, iteration - self._asked_at)
        answers = self._gather(self.times.take(), pace=pace)
        found = _slowest(answers)
        complete = len(answers) == self._everyone.num_workers
        idle = [link for link in self.plan.topology.links if link not in found]
        if idle and complete:
            found |= _slowest(self._gather(self._probed(idle)))
        self._since = time.perf_counter()
        usual = sum(answer["pace"] for answer in answers) / len(answers)
        return (found if complete else None), usual

    def _gather(self, seconds: Mapping[int, float], **more: float) -> list[dict[str, Any]]:
        """Tell all what the links to neighbours took, and more; what each worker told."""
        rank = self._transport.rank
        links = [((min(rank, peer), max(rank, peer)), s) for peer, s in seconds.items()]
        content = json.dumps({"links": links, **more}).encode()
        return [json.loads(a) for a in gather(self._everyone, content, self._timeout())]

    def _probed(self, idle: Sequence[Link]) -> dict[int, float]:
        """Time links that the plan does not use, so that one that recovers is noticed.

        All take them in the same order, so none waits in a circle.
        """
        transport, found = self._transport, dict[int, float]()
        size = max(1, min(_MAX_PROBED, int(self._bytes)))
        for i, j in idle:
            if transport.rank in (i, j):
                peer = i + j - transport.rank
                try:
                    seconds = exchange_time(transport, peer, size, 1, self._timeout())
                except PeerLostError:  # a link that is gone has no time
                    continue
                found[peer] = seconds * max(1.0, self._bytes / size)
        return found


def _slowest(answers: Sequence[Mapping[str, Any]]) -> dict[Link, float]:
    """Each link's seconds as the end saw it that saw all of it."""
    told = sorted(((i, j), s) for answer in answers for (i, j), s in answer["links"])
    return dict(told)  # of the two ends' the larger comes last
