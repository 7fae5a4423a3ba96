"""Meeting hooks: meetings that may be lost, that are bounded, and that are timed."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

import torch

from matcha.distributed.exchange.buckets import copy_values
from matcha.distributed.exchange.exchange import Exchange
from matcha.distributed.exchange.meeting import Meeting, MeetingHook
from matcha.distributed.links.transport import LinkTransport
from matcha.distributed.transports.base import Message, Pending, Tag
from matcha.errors import PeerLostError
from matcha.training.clipping import kept_share, renewed_reach

Outcome: TypeAlias = Literal["held", "left out", "uncertain"]

_log = logging.getLogger("matcha.links")


class ElasticMeetings(MeetingHook):
    """Leaves out meetings with workers that are missing, and takes back those that break off.

    Values go both ways and then one byte, "I have all of it", both ways. An end that does not get
    that byte leaves the meeting out: its values are what they were (W = I there), and the average
    is kept. The last byte itself can be lost while its sender goes on: then one end has moved and
    the other has not, the sum shifts once by at most w‖x_i − x_j‖, and that is counted.

    It costs a copy of the values and one byte's round trip per meeting; pieces are still pipelined
    within a meeting.

    Attributes:
        held: meetings that took place.
        left_out: meetings that did not.
        uncertain: of those left out, the ones in which the other end may have moved.
        shift: the most by which those can have moved the sum over workers (a norm).
        on_meeting: called after each meeting with its iteration, what became of it, and its shift.
    """

    def __init__(
        self, exchange: Exchange, team: LinkTransport, values: Sequence[torch.Tensor]
    ) -> None:
        self._exchange, self._team, self._values = exchange, team, list(values)
        self._before = [torch.empty_like(value) for value in values]
        self._connections: dict[int, object] = {}
        self._iteration = 0
        self._is_under_way = self._has_all = False
        self.held = self.left_out = self.uncertain = 0
        self.shift = 0.0
        self.on_meeting: Callable[[int, Meeting, Outcome, float], None] | None = None

    def begin_round(self, iteration: int) -> None:
        self._team.begin(iteration)

    def before(self, meeting: Meeting, iteration: int) -> bool:
        """False where the partner will not come."""
        self._iteration = iteration
        self._is_under_way = self._has_all = False
        if not self._team.meets(meeting.peer, iteration):
            self._count(meeting, "left out")
            return False
        # What a wire remembers of a link must be the same at both ends: a new one has no past.
        connection = self._team.connection(meeting.peer)
        if self._connections.setdefault(meeting.peer, connection) is not connection:
            self._connections[meeting.peer] = connection
            self._exchange.forget(meeting.peer)
        copy_values(self._before, self._values)
        self._is_under_way = True
        return True

    def after(self, meeting: Meeting) -> None:
        """Confirm, and wait for the partner's confirmation."""
        self._has_all = True
        # The other may be gone as soon as it has our byte: its own is asked for before ours leaves,
        # and it alone is waited for.
        peer, byte = meeting.peer, torch.uint8
        theirs = Message(peer=peer, tag=Tag.CONFIRM, incoming=torch.empty(1, dtype=byte))
        ours = Message(peer=peer, tag=Tag.CONFIRM, outgoing=torch.ones(1, dtype=byte))
        pending = self._team.post([theirs])
        self._team.post([ours])
        pending.wait(self._exchange.timeout)
        self._count(meeting, "held")

    def undo(self, meeting: Meeting, error: PeerLostError) -> bool:
        """The values are what they were before the meeting."""
        if not self._is_under_way:
            return False
        _log.info("worker %d: iteration %d: %s", self._team.rank, self._iteration, error)
        shift = math.sqrt(_squares(self._values, self._before)) if self._has_all else 0.0
        copy_values(self._values, self._before)
        self._count(meeting, "uncertain" if self._has_all else "left out", shift)
        return True

    def _count(self, meeting: Meeting, outcome: Outcome, shift: float = 0.0) -> None:
        self.held += outcome == "held"
        self.left_out += outcome != "held"
        self.uncertain += outcome == "uncertain"
        self.shift += shift
        if self.on_meeting is not None:
            self.on_meeting(self._iteration, meeting, outcome, shift)


class Clipping(MeetingHook):
    """Bounds how far each meeting moves this worker.

    The definition is `matcha.training.clipping`; a worker's difference to a partner may be
    `allowance` times its reach. It costs two copies of the values and eight bytes per meeting.
    """

    def __init__(
        self, exchange: Exchange, values: Sequence[torch.Tensor], allowance: float
    ) -> None:
        self._exchange, self._allowance = exchange, allowance
        self._values = [v for v in values if v.is_floating_point() or v.is_complex()]
        self._before = [torch.empty_like(value) for value in self._values]
        self._after = [value.clone() for value in self._values]
        self._reach = torch.zeros((), dtype=torch.float64)
        self._now = 0.0
        self._theirs = torch.zeros(1, dtype=torch.float64)
        self._pending: Pending

    def state(self) -> Mapping[str, torch.Tensor]:
        """What later rounds depend on."""
        return {"reach": self._reach, **{f"after-{k}": a for k, a in enumerate(self._after)}}

    def begin_round(self, iteration: int) -> None:
        """How far this worker went since its last meeting."""
        self._now = renewed_reach(float(self._reach), _squares(self._values, self._after))

    def before(self, meeting: Meeting, iteration: int) -> bool:
        """Tell each other how far both went."""
        copy_values(self._before, self._values)
        mine = torch.tensor([self._now], dtype=torch.float64)
        self._theirs = torch.empty_like(mine)
        message = Message(peer=meeting.peer, tag=Tag.CLIP, incoming=self._theirs, outgoing=mine)
        self._pending = self._exchange.transport.post([message])
        return True

    def after(self, meeting: Meeting) -> None:
        """Shorten the move; one with a NaN is taken back."""
        self._pending.wait(self._exchange.timeout)
        theirs = float(self._theirs)
        reach = min(self._now, theirs) if theirs >= 0 else self._now
        limit = meeting.weight * self._allowance * math.sqrt(reach)
        share = kept_share(math.sqrt(_squares(self._values, self._before)), limit)
        if share == 0:
            copy_values(self._values, self._before)
        elif share != 1:
            for value, before in zip(self._values, self._before, strict=True):
                value.sub_(before).mul_(share).add_(before)

    def end_round(self, num_held: int) -> None:
        """One without a meeting changes nothing."""
        if num_held:
            self._reach.fill_(self._now)
            copy_values(self._after, self._values)


def _squares(xs: Sequence[torch.Tensor], ys: Sequence[torch.Tensor]) -> float:
    """The squared distance; infinite where it is NaN."""
    total = sum(float((x - y).abs().double().square().sum()) for x, y in zip(xs, ys, strict=True))
    return total if math.isfinite(total) else math.inf


_RECENT = 7  # meetings, of which the median counts
_WAITED = 1e-4  # seconds: less does not count as waiting


class LinkTimes:
    """What meetings took, by neighbour, since the last call of `take`.

    The end that comes to a meeting first sees how long the other's message takes. For the one that
    comes second, part of it has arrived already: such a meeting counts only if there is no other.

    >>> times = LinkTimes()
    >>> times.add(1, 0.5, waited=0.1)
    >>> times.add(1, 0.1, waited=0.0)
    >>> times.take(), times.take()
    ({1: 0.5}, {})
    """

    def __init__(self) -> None:
        self._first: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_RECENT))
        self._second: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_RECENT))

    def add(self, peer: int, seconds: float, *, waited: float) -> None:
        """Count one meeting: what it took once both were there, and the wait before."""
        (self._first if waited > _WAITED else self._second)[peer].append(seconds)

    def take(self) -> dict[int, float]:
        """The neighbours met since the last call, and the median time of recent meetings."""
        found = {**self._second, **self._first}
        self._first.clear()
        self._second.clear()
        return {peer: statistics.median(seconds) for peer, seconds in sorted(found.items())}


class LinkTimer(MeetingHook):
    """Measures each meeting of an exchange."""

    def __init__(self, exchange: Exchange, times: LinkTimes) -> None:
        self._exchange, self._times = exchange, times
        self._started = self._waited = 0.0

    def before(self, meeting: Meeting, iteration: int) -> bool:
        self._started, self._waited = time.perf_counter(), self._exchange.wait_seconds
        return True

    def after(self, meeting: Meeting) -> None:
        waited = self._exchange.wait_seconds - self._waited
        seconds = time.perf_counter() - self._started - waited
        self._times.add(meeting.peer, seconds, waited=waited)
