"""Membership: how a worker that comes late, or back, gets a state, and gives its own to others."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Protocol

from matcha.distributed.exchange.meetings import MeetingPlace
from matcha.distributed.saving.snapshots import Worker, dump_snapshot, load_snapshot
from matcha.distributed.transports.base import Buffer, Transport

__all__ = ["Membership", "Team", "as_team"]

_log = logging.getLogger("matcha.links")
_MOST_BEHIND = 1.0  # seconds of work that others may have to wait for this worker to catch up
_FEWEST_BEHIND = 3  # iterations


class Change(Protocol):
    """A worker was lost or came."""

    iteration: int
    worker: int
    is_member: bool


class Calls(Protocol):
    """The collective calls of a team."""

    number: int
    """How many are over."""


class Team(MeetingPlace, Protocol):
    """A transport whose workers may come and go: `LinkTransport`."""

    asks: list[int]
    calls: Calls
    most_behind: float
    searches_cause: bool

    @property
    def is_behind(self) -> bool:
        """Whether this worker was away for so long that it should take another's state."""

    @property
    def is_late(self) -> bool:
        """Whether others train already and this worker needs a state."""

    @property
    def changes(self) -> Sequence[Change]:
        """Who came and went so far, as this worker learnt it."""

    def ask_for_state(self, timeout: float) -> tuple[int, bytearray]:
        """A neighbour and its state."""

    def give_state(self, contents: Sequence[Buffer]) -> None:
        """Answer everybody who asked."""

    def start_at(self, iteration: int) -> None:
        """Take part from an iteration on."""

    def leave(self) -> None:
        """Stop taking part, to take a newer state."""


def as_team(transport: Transport) -> Team:
    """The transport, as one whose workers may come and go; `options.check_setup` has seen to it."""
    team: Any = transport
    return team  # type: ignore[no-any-return]


class Pace:
    """How long an iteration takes as a rule: a stop of the whole process is none, nor is the first.

    >>> pace = Pace(0)
    >>> for iteration, now in enumerate([0.001, 0.1, 0.2, 5.2], start=1):
    ...     pace.note(iteration, now)
    >>> round(pace.seconds, 3)
    0.1
    """

    def __init__(self, iteration: int) -> None:
        self._iteration = iteration
        self._last: float | None = None
        self._recent: deque[float] = deque(maxlen=9)

    def note(self, iteration: int, now: float) -> None:
        """So far the worker has come by now; the same iteration may be told more than once."""
        if iteration == self._iteration:
            return
        if self._last is not None and iteration > self._iteration:
            self._recent.append((now - self._last) / (iteration - self._iteration))
        self._iteration, self._last = iteration, now

    @property
    def seconds(self) -> float | None:
        """The median of the last few; None before there are any."""
        return max(median(self._recent), 1e-6) if self._recent else None


class Membership:
    """One worker's part in a team that goes on when some are lost.

    A new process in a dead worker's place, or a worker that was away for long, takes model,
    optimizer and position from a neighbour at that one's next step, and takes part from there.
    """

    def __init__(self, worker: Worker, team: Team, deadline: float) -> None:
        self._worker, self._team, self._deadline = worker, team, deadline
        self.returns = 0
        """How often this worker took another's state."""
        self.donor: int | None = None
        """Whose it took last."""
        self._give: Callable[[], dict[str, Any]] = dict
        self._take: Callable[[dict[str, Any]], None] = lambda _: None
        self._taken: dict[str, Any] = {}
        self._pace = Pace(worker.iteration)
        self._returned: list[list[int]] = []
        self._known = 0
        team.searches_cause = False

    def start(self, iteration: int) -> None:
        """Take part: from an iteration on, or from where a neighbour is if others train already."""
        if self._team.is_late:
            self.join()
        else:
            self._team.start_at(iteration)
            # A stop may come before a pace is known. (One that joins may well be behind at first.)
            self._team.most_behind = _FEWEST_BEHIND
        self._known = len(self._team.changes)  # up to here they came to the start

    def join(self) -> None:
        """Take a neighbour's state and go on from there."""
        started = time.monotonic()
        self.donor, content = self._team.ask_for_state(self._deadline)
        extra = load_snapshot(content, self._worker)
        for peer in range(self._worker.transport.num_workers):  # the donor's links are not its own
            self._worker.exchange.forget(peer)
        self._team.calls.number = int(extra["calls"])
        self._taken = extra["carried"]
        self._take(self._taken)
        self._team.start_at(self._worker.iteration)
        self.returns += 1
        self._returned.append([self._worker.iteration, self._team.rank, 1])
        _log.info(
            "worker %d: goes on from worker %d's state at iteration %d, after %.2f s",
            self._team.rank, self.donor, self._worker.iteration, time.monotonic() - started,
        )  # fmt: skip

    def carry(
        self, give: Callable[[], dict[str, Any]], take: Callable[[dict[str, Any]], None]
    ) -> bool:
        """As `Gossip.carry`."""
        self._give, self._take = give, take
        if self.returns:
            take(self._taken)
        return self.returns > 0

    def changes(self) -> list[list[int]]:
        """As `Gossip.changes`: others' as this worker learnt it, and its own returns."""
        others = self._team.changes[self._known :]
        return [
            *self._returned,
            *([c.iteration, c.worker, int(c.is_member)] for c in others),
        ]

    def tend(self) -> None:
        """Between two rounds: answer those who came back; catch up when far behind."""
        team = self._team
        self._pace.note(self._worker.iteration, time.perf_counter())
        if self._pace.seconds is not None:
            team.most_behind = max(_FEWEST_BEHIND, _MOST_BEHIND / self._pace.seconds)
        if team.asks:
            extra = {"calls": team.calls.number, "carried": self._give()}
            team.give_state([dump_snapshot(self._worker, extra)])
        if team.is_behind:
            team.leave()
            self.join()
