"""Meetings: where a worker is in a plan, whom it meets there, and how a meeting begins."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import repeat

import torch

from matcha.distributed.transports.base import Message, Pending, Transport
from matcha.errors import ExchangeError, PeerLostError
from matcha.plans import Plan, PlanLike, StagedPlan
from matcha.rounds import ONE_WAY, OneWayRole, Round

RUNNING = -1  # in place of the iteration at which a worker finished


@dataclass(frozen=True, slots=True)
class Meeting:
    """One partner of this worker in a round, at one position of the round's matchings."""

    position: int
    peer: int
    weight: float
    """The partner's share."""
    role: OneWayRole | None = None
    """Where messages go one way: whom this worker sends to, and receives from."""

    def messages(
        self, tag: int, incoming: torch.Tensor, outgoing: torch.Tensor
    ) -> Sequence[Message]:
        """What this worker posts to send one tensor and receive another."""
        if self.role is None:
            return [Message(peer=self.peer, tag=tag, incoming=incoming, outgoing=outgoing)]
        found = []
        if self.role.source is not None:
            found.append(Message(peer=self.role.source, tag=tag, incoming=incoming))
        if self.role.to is not None:
            found.append(Message(peer=self.role.to, tag=tag, outgoing=outgoing))
        return found

    @property
    def sends(self) -> bool:
        """Whether this worker sends at all."""
        return self.role is None or self.role.to is not None


def meetings(round: Round, worker: int) -> tuple[Meeting, ...]:
    """Whom a worker meets in a round, in order; empty when it rests."""
    if round.mixing in ONE_WAY:
        roles = enumerate(round.one_way_roles(worker))
        return tuple(Meeting(t, role.peer, role.taken, role) for t, role in roles if role)
    found = []
    for t, matching in enumerate(round.matchings):
        for (i, j), weight in zip(matching, round.shares(t), strict=True):
            if worker in (i, j):
                found.append(Meeting(t, j if i == worker else i, weight))
    return tuple(found)


class Handshake:
    """The message that opens a meeting: where in the plan its sender is, and what codecs must know.

    The position is a small message of its own: it leaves the values as they are, tells when the
    partner came, and is a sign of life that transports can watch for.

    Who makes one posts its `messages`. Once it `has_come`, `answer` is the partner's content, and
    `both_finished` whether both ends say that they have finished.
    """

    pending: Pending
    has_come = both_finished = False
    scales: Sequence[torch.Tensor] = ()
    """What a codec found in the answer."""

    def __init__(
        self,
        transport: Transport,
        meeting: Meeting,
        tag: int,
        iteration: int,
        finished_at: int,
        content: torch.Tensor | None,
    ) -> None:
        self._transport, self._peer, self._iteration = transport, meeting.peer, iteration
        self._has_finished = finished_at != RUNNING
        device = transport.device or torch.device("cpu")
        position = torch.tensor([iteration, finished_at], dtype=torch.int64, device=device)
        self._position = position.clone()  # stays so where nothing is received
        self.messages = [*meeting.messages(tag, self._position, position)]
        self.answer = content
        if content is not None:
            content = content.to(device)
            self.answer = torch.empty_like(content)
            self.messages += meeting.messages(tag, self.answer, content)

    def wait(self, timeout: float) -> None:
        """Wait until the partner has come."""
        self.pending.wait(timeout)
        self.has_come = True
        iteration, finished_at = self._position.tolist()
        if iteration != self._iteration:
            name, rank = self._transport.name, self._transport.rank
            raise ExchangeError(
                f"{name(self._peer)} is at iteration {iteration}, but {name(rank)} is at "
                f"{self._iteration}: the workers took different numbers of steps."
            )
        self.both_finished = self._has_finished and finished_at != RUNNING


class MeetingHook:
    """What is done around each meeting; with hooks, meetings are held one after another."""

    def begin_round(self, iteration: int) -> None:
        """Prepare for a round in which this worker has meetings."""

    def before(self, meeting: Meeting, iteration: int) -> bool:
        """Prepare for a meeting; False leaves it out."""
        return True

    def after(self, meeting: Meeting) -> None:
        """Finish a meeting in which all values have come."""

    def undo(self, meeting: Meeting, error: PeerLostError) -> bool:
        """Take a meeting back whose partner was lost; False where this hook cannot."""
        return False

    def end_round(self, num_held: int) -> None:
        """Finish a round; `num_held` of its meetings took place."""


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
        self._rank, self._alone = rank, alone
        self._met = lru_cache(maxsize=_KNOWN_ROUNDS)(partial(meetings, worker=rank))
        self.passed: set[int] = set()
        self.iteration = iteration
        self.follow(plan)

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
