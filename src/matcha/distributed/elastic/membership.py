"""Membership: how a worker that comes late, or back, gets a state, and gives its own to others."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from matcha.distributed.links.connection import Connection, LinkState
from matcha.distributed.links.framing import Kind
from matcha.distributed.links.transport import LinkTransport
from matcha.distributed.snapshot import dump_snapshot, load_snapshot
from matcha.distributed.transports.base import Buffer
from matcha.distributed.worker_state import WorkerState
from matcha.errors import ExchangeError

_log = logging.getLogger("matcha.links")
_MAX_LAG_SECONDS = 1.0  # of work for which others may wait while this worker catches up
_MIN_LAG = 3  # iterations
_ASK_ANOTHER = 2.0  # seconds after which another neighbour is asked for its state as well


def give_state(
    transport: LinkTransport, contents: Sequence[Buffer], peers: Collection[int]
) -> None:
    """Answer some of the neighbours that asked for this worker's state."""
    with transport.lock:
        for peer in sorted(peers):
            connection = transport.connections.get(peer)
            if connection is not None and not connection.is_up:
                connection.send(Kind.STATE, 0, contents)
        transport.state_requests -= {*peers}


def ask_state(
    transport: LinkTransport, timeout: float, without: Collection[int] = ()
) -> tuple[int, bytearray]:
    """Return a neighbour and its state; raises `ExchangeError` where none gives one in time.

    Two that come back together have nothing to give each other, and would wait for each other: only
    those are asked that train. One that does may be held up: then the next is asked, too.
    """
    end, again = time.monotonic() + timeout, 0.0
    asked: list[Connection] = []
    with transport.lock:
        while (now := time.monotonic()) < end:
            for connection in asked:
                if connection.given_state is not None:
                    return connection.peer, connection.given_state
            if asked and all(c.end_reason and c.finished_at is not None for c in asked):
                who, why = transport.name(asked[0].peer), asked[0].end_reason
                raise ExchangeError(f"the run is over: {who} {why}.")
            asked = [each for each in asked if each.state is not LinkState.ENDED]
            other = next((c for c in _donors(transport, without) if c not in asked), None)
            is_due = now > again and not any(each.is_giving for each in asked)
            if other is not None and (is_due or not asked):
                other.is_asked = True
                other.send(Kind.ASK_STATE)
                asked.append(other)
                again = now + _ASK_ANOTHER
            transport.changed.wait(0.2)
    raise ExchangeError(f"no neighbour gave its state within {timeout:g} s.")


def _donors(transport: LinkTransport, without: Collection[int]) -> list[Connection]:
    with transport.lock:
        found = (connection for _, connection in sorted(transport.connections.items()))
        return [each for each in found if each.peer_has_state and each.peer not in without]


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The average model, from which workers start that join: so they leave it as it is."""

    workers: frozenset[int]
    values: Sequence[torch.Tensor]
    """By bucket."""


class Membership:
    """One worker's part in a team that goes on when some are lost.

    A new process in a dead worker's place, or a worker that was away for long, takes model,
    optimizer and position from a neighbour at that one's next step, and takes part from there.

    Attributes:
        returns: How many times this worker took another's state.
        donor: Whose state it took last.
        taken: What the donor's script carried along with that state.
        welcome: What workers get that join now, in place of this worker's own values.
    """

    def __init__(self, state: WorkerState, transport: LinkTransport) -> None:
        self._state, self._transport = state, transport
        self.returns = 0
        self.donor: int | None = None
        self._give: Callable[[], dict[str, Any]] = dict
        self._take: Callable[[dict[str, Any]], None] = lambda _: None
        self.taken: dict[str, Any] = {}
        self.welcome: Welcome | None = None
        self._placed_at: int | None = None
        self._returned: list[list[int]] = []
        self._known = 0
        transport.finds_cause = False  # the others go on without the one that is lost

    def start(self, iteration: int) -> None:
        """Take part: from an iteration on, or from where a neighbour is if others train already."""
        if self._transport.needs_state:
            self.join()
            self._placed_at = self._state.iteration
        else:
            self._transport.start_at(iteration)
            # A stop may come before a pace is known. (One that joins may well be behind at first.)
            self._transport.max_lag = _MIN_LAG
        self._known = len(self._transport.changes)  # up to here they came to the start

    def rejoin(self) -> None:
        """Leave, and take a neighbour's state as one that was lost does."""
        self._transport.leave()
        self.join()

    def join(self) -> None:
        """Take a neighbour's state and go on from there."""
        transport, state, started = self._transport, self._state, time.monotonic()
        refused: set[int] = set()
        while True:
            self.donor, content = ask_state(transport, state.timeout, refused)
            try:
                extra = load_snapshot(content, state)
                num_calls, self.taken = int(extra["calls"]), extra["carried"]
                self._take(self.taken)
                break
            except Exception as error:  # the donor's fault, unless all states are of no use here
                refused.add(self.donor)
                transport.refuse(self.donor, f"gave a state that cannot be used ({error})")
                if not _donors(transport, refused):
                    raise
        for peer in range(transport.num_workers):  # the donor's links are not its own
            state.exchange.forget(peer)
        transport.collectives.number = num_calls
        transport.start_at(state.iteration)
        self.returns += 1
        self._returned.append([state.iteration, transport.rank, 1])
        _log.info(
            "worker %d: goes on from worker %d's state at iteration %d, after %.2f s",
            transport.rank, self.donor, state.iteration, time.monotonic() - started,
        )  # fmt: skip

    @property
    def is_placed(self) -> bool:
        """Whether this worker came late and has not stepped yet.

        The others came to where they are by loading a checkpoint, or without one, long ago: no call
        of theirs answers one that this worker makes to begin.
        """
        return self._placed_at == self._state.iteration

    def carry(
        self, give: Callable[[], dict[str, Any]], take: Callable[[dict[str, Any]], None]
    ) -> bool:
        """Let something of the script's own travel with the state of a late worker.

        Args:
            give: returns it; what a checkpoint's `extra` may hold.
            take: called with a neighbour's.

        Returns:
            Whether this worker came late: then `take` was called.
        """
        self._give, self._take = give, take
        if self.returns:
            take(self.taken)
        return self.returns > 0

    def changes(self) -> list[list[int]]:
        """Return who went or came, as this worker learnt it: iteration, worker, 1 if it came."""
        others = self._transport.changes[self._known :]
        return [*self._returned, *([c.iteration, c.worker, int(c.is_member)] for c in others)]

    def tend(self) -> None:
        """Between two rounds: give states to those that ask; catch up when far behind.

        Every step does so; call it where none is taken for long.
        """
        transport, pace = self._transport, self._state.pace.seconds
        if pace is not None:
            transport.max_lag = max(_MIN_LAG, _MAX_LAG_SECONDS / pace)
        if asked := frozenset(transport.state_requests):  # more may come while a state is written
            extra = {"calls": transport.collectives.number, "carried": self._give()}
            new = asked & self.welcome.workers if self.welcome is not None else frozenset()
            if self.welcome is not None and new:
                with self._state.averaging.holding(self.welcome.values):
                    give_state(transport, [dump_snapshot(self._state, extra)], new)
            if asked - new:
                give_state(transport, [dump_snapshot(self._state, extra)], asked - new)
        if transport.is_behind:
            self.rejoin()
