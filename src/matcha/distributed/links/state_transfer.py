"""State transfer: a worker that needs a state asks its neighbours, one of which gives its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from matcha.distributed.links.connection import Connection, LinkState
from matcha.distributed.links.framing import Kind
from matcha.distributed.transports.base import Buffer
from matcha.errors import ExchangeError

__all__ = ["StateTransfer"]

_ASK_ANOTHER = 2.0  # seconds after which another neighbour is asked as well


class StateTransfer:
    """Whole states that travel between a worker and its neighbours.

    Args:
        changed: Notified whenever something is different; its lock guards everything here.
        connections: This worker's connections, by neighbour.
        name: How people find a worker.

    Attributes:
        requests: Neighbours that wait for this worker's state.
    """

    def __init__(
        self,
        changed: threading.Condition,
        connections: Mapping[int, Connection],
        name: Callable[[int], str],
    ) -> None:
        self._changed, self._connections, self._name = changed, connections, name
        self.requests: set[int] = set()

    def give(self, contents: Sequence[Buffer], peers: Collection[int]) -> None:
        """Answer some of the neighbours that asked for this worker's state."""
        with self._changed:
            for peer in sorted(peers):
                connection = self._connections.get(peer)
                if connection is not None and not connection.is_up:
                    connection.send(Kind.STATE, 0, contents)
            self.requests -= {*peers}

    def ask(self, timeout: float, without: Collection[int] = ()) -> tuple[int, bytearray]:
        """Return a neighbour and its state.

        Args:
            timeout: Seconds to wait.
            without: Neighbours not to ask.

        Raises:
            ExchangeError: No neighbour gave one in time.
        """
        end = time.monotonic() + timeout
        asked: list[Connection] = []
        again = 0.0
        with self._changed:
            while (now := time.monotonic()) < end:
                for connection in asked:
                    if connection.given_state is not None:
                        return connection.peer, connection.given_state
                self._check_not_over(asked)
                asked = [each for each in asked if each.state is not LinkState.ENDED]
                # Two that come back together have nothing to give each other, and would wait
                # for each other. One that has a state may be held up: then ask the next, too.
                able = self._able(without)
                other = next((each for each in able if each not in asked), None)
                is_due = now > again and not any(each.is_giving for each in asked)
                if other is not None and (is_due or not asked):
                    other.is_asked = True
                    other.send(Kind.ASK_STATE)
                    asked.append(other)
                    again = now + _ASK_ANOTHER
                self._changed.wait(0.2)
        raise ExchangeError(f"no neighbour gave its state within {timeout:g} s.")

    def refuse(self, donor: int, problem: str, refused: Collection[int]) -> bool:
        """End the link on which a state came; whether other neighbours have one."""
        with self._changed:
            connection = self._connections.get(donor)
            if connection is not None:
                connection.on_end(connection, problem)
            return bool(self._able(refused))

    def _able(self, without: Collection[int]) -> list[Connection]:
        found = (each for _, each in sorted(self._connections.items()))
        return [each for each in found if each.peer_has_state and each.peer not in without]

    def _check_not_over(self, asked: Sequence[Connection]) -> None:
        gone = [each for each in asked if each.end_reason and each.finished_at is not None]
        if gone and len(gone) == len(asked):
            peer = self._name(gone[0].peer)
            raise ExchangeError(f"the run is over: {peer} {gone[0].end_reason}.")
