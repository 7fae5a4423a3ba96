"""Tree collectives: what all members do together, along a spanning tree of links that are up.

Parts are reduced towards the root, the lowest rank that is alive, and the result comes back. When a
link ends in the middle, updates change the tree of every worker, and the call starts again with the
remaining ones; a worker that missed the result of a call that the others have finished asks a
neighbour for it. A result returns along the tree by which parts came, also where the tree has
changed since: a worker that has the result may close its connections at once, and that changes the
tree of those that still wait.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from matcha.distributed.links.connection import Connection
from matcha.distributed.links.framing import Kind
from matcha.distributed.links.link_state import LinkVersions, Tree
from matcha.distributed.transports.base import Buffer, Combine, Conclude
from matcha.errors import ExchangeError

T = TypeVar("T")

_log = logging.getLogger("matcha.links")
_KNOWN, _UNKNOWN = b"1", b"0"
_DIGEST = 16  # characters of a tree's digest, before each part
_AGAIN = 1.0  # seconds after which a call that does not end asks whether others have ended it
_MAX_AHEAD = 64  # calls by which a neighbour can be ahead of this worker


@dataclass(eq=False)
class TreeCollectives:
    """Collective calls of one worker; every member makes the same calls in the same order."""

    changed: threading.Condition
    """Notified whenever something is different; its lock guards everything here."""
    versions: LinkVersions
    connections: Callable[[], Sequence[Connection]]
    """Those that are up."""
    anyone_is_away: Callable[[], bool]
    """Whether a member said that it does long work alone: then none is late."""
    may_return: Callable[[], Collection[int]]
    """Workers that were lost only a moment ago, without a goodbye."""
    name: Callable[[int], str]
    """How people find a worker."""
    number: int = 0
    """How many calls this worker has finished; one that comes back takes a neighbour's."""

    def __post_init__(self) -> None:
        self._took_part: Collection[int] = ()
        self._parts: dict[int, dict[int, tuple[str, memoryview]]] = {}
        self._results: dict[int, tuple[int, memoryview | None]] = {}
        self._askers: dict[int, int] = {}
        self._below: set[int] = set()  # children in any tree along which this call was tried
        self._last: Buffer = b""

    def call(
        self,
        combine: Combine,
        conclude: Conclude,
        read: Callable[[Buffer], T],
        timeout: float,
        give_up: Callable[[], bool] = lambda: False,
    ) -> T | None:
        """Make one collective call: what is read from the result, or None after `give_up`.

        The rest is as for `Transport.tree_call`. A part or a result that raises ends the connection
        on which it came; `ExchangeError` names the members that did not come in time.
        """
        end = time.monotonic() + timeout
        while True:
            with self.changed:
                if give_up():
                    return None
                sender, result = self._results.get(self.number, (None, None))
            found: Buffer | None = result
            if sender is None:
                found = self._attempt(combine, conclude, end, give_up)
            elif result is None:
                # An island that comes back may be several calls behind: it answers them alone.
                _log.warning("call %d was over long ago: answered alone", self.number)
                found = conclude({}, 1)
            if found is None:
                continue
            try:
                value = read(found)
            except Exception as error:
                if sender is None or result is None:  # this worker's own
                    raise
                with self.changed:
                    del self._results[self.number]
                self._refuse(sender, f"a result ({error})")
            else:
                self._finish(found)
                return value

    def forget(self, workers: Collection[int]) -> None:
        """Miss them no more: they have left for good."""
        self._took_part = {*self._took_part} - {*workers}

    def _attempt(
        self, combine: Combine, conclude: Conclude, end: float, give_up: Callable[[], bool]
    ) -> Buffer | None:
        """The result; None when the tree changed on the way, or others have the result."""
        with self.changed:
            tree = self.versions.tree
            self._below |= {*tree.children}
        all_came = lambda: all(self._has_part(child, tree) for child in tree.children)  # noqa: E731
        if not self._wait(tree, all_came, end, give_up):
            return None
        if tree.parent is None and not self._stays(tree, end):
            return None
        with self.changed:
            parts = {child: self._parts[child][self.number][1] for child in tree.children}
        try:
            if tree.parent is None:
                return conclude(parts, len(tree.members))
            part = [tree.digest.encode(), *combine(parts)]
        except Exception:
            if not self._refuse_parts(combine, parts):
                raise
            return None
        with self.changed:
            self._send([tree.parent], Kind.REDUCE, self.number, part)
        self._wait(tree, lambda: False, end, give_up)  # for the result, which comes from above
        return None

    def _refuse_parts(self, combine: Combine, parts: dict[int, memoryview]) -> bool:
        """End the connections to children whose parts cannot be used; whether there are any."""
        refused = False
        for child, part in parts.items():
            try:
                combine({child: part})
            except Exception as error:
                refused = True
                self._refuse(child, f"a part ({error})")
        return refused

    def _refuse(self, peer: int, what: str) -> None:
        reason = f"sent {what} of a collective call that cannot be used"
        with self.changed:
            if (connection := self._connection(peer)) is not None:
                _log.warning("worker %d %s", peer, reason)
                connection.on_end(connection, reason)

    def _stays(self, tree: Tree, end: float) -> bool:
        """At the root: whether these are all members, once those lost just now had time to return.

        A worker on a loaded machine is silent for too long now and then, and all its links end; it
        would be the root of itself, and its own model the average of all.
        """
        with self.changed:
            while self.may_return() and time.monotonic() < end:
                if self.versions.tree.digest != tree.digest:
                    return False
                self.changed.wait(0.05)
            if self.versions.tree.digest != tree.digest:
                return False
            gone = sorted({*self._took_part} - {*tree.members})
            self._took_part = tree.members
        if gone:
            who, text = ", ".join(map(self.name, gone)), "%d workers meet without %s, "
            _log.warning(text + "which cannot be reached", len(tree.members), who)
        return True

    def _has_part(self, child: int, tree: Tree) -> bool:
        found = self._parts.get(child, {}).get(self.number)
        return found is not None and found[0] == tree.digest

    def _wait(
        self, tree: Tree, ready: Callable[[], bool], end: float, give_up: Callable[[], bool]
    ) -> bool:
        """Wait for something; False when the tree changed or another worker has the result."""
        asked = time.monotonic() + _AGAIN
        with self.changed:
            above = self._connection(tree.parent)
            while True:
                if self.number in self._results or give_up():
                    return False
                if ready():
                    return True
                # A parent that was replaced between two looks does not have our part.
                is_replaced = above != self._connection(tree.parent)
                if self.versions.tree.digest != tree.digest or is_replaced:
                    self._ask()
                    return False
                now = time.monotonic()
                if now > end and not self.anyone_is_away():
                    raise ExchangeError(self._missing())
                if now > asked:
                    self._ask()
                    asked = now + _AGAIN
                self.changed.wait(max(0.0, min(end, asked) - now) + 0.01)

    def _connection(self, peer: int | None) -> Connection | None:
        return next((each for each in self.connections() if each.peer == peer), None)

    def _ask(self) -> None:
        neighbors = [connection.peer for connection in self.connections()]
        self._send(neighbors, Kind.MISSED, self.number, [])

    def _finish(self, result: Buffer) -> None:
        with self.changed:
            number = self.number
            self.number += 1
            self._last = result
            asked = {peer for peer, call in self._askers.items() if call == number}
            self._send(asked | self._below, Kind.RESULT, number, [_KNOWN, result])
            self._askers.clear()
            self._below.clear()
            self._results = {n: value for n, value in self._results.items() if n > number}
            for parts in self._parts.values():
                for old in [n for n in parts if n <= number]:
                    del parts[old]

    def _missing(self) -> str:
        children = self.versions.tree.children
        absent = [child for child in children if self.number not in self._parts.get(child, {})]
        who = ", ".join(map(self.name, absent)) or "the members above this worker in the tree"
        return f"{who} did not come to what all workers do together."

    # -- frames that arrive; the lock is held -----------------------------------------------------

    def on_frame(self, connection: Connection, kind: Kind, number: int, content: bytearray) -> None:
        """Take in a frame of a collective call."""
        if kind is Kind.RESULT and content[:1] not in (_KNOWN, _UNKNOWN):
            raise ValueError("a result that says neither known nor unknown")
        if number > self.number + _MAX_AHEAD:
            return  # this worker is that far behind: it asks when it comes to that call
        if kind is Kind.RESULT:
            if number >= self.number:
                view = memoryview(content)
                result = view[1:] if view[:1] == _KNOWN else None
                self._results[number] = connection.peer, result
        elif number < self.number:  # this worker has finished that call: it sends the result
            known = number == self.number - 1
            if not connection.will_send(Kind.RESULT, number):
                answer = [_KNOWN, self._last] if known else [_UNKNOWN]
                connection.send(Kind.RESULT, number, answer)
        elif kind is Kind.MISSED:
            self._askers[connection.peer] = number
        else:
            digest, part = content[:_DIGEST].decode("ascii"), memoryview(content)[_DIGEST:]
            parts = self._parts.setdefault(connection.peer, {})
            for other in [n for n in parts if n != self.number]:
                del parts[other]  # a worker is in one call at a time
            parts[number] = digest, part
        self.changed.notify_all()

    def _send(
        self, peers: Collection[int], kind: Kind, number: int, contents: Sequence[Buffer]
    ) -> None:
        for connection in self.connections():
            if connection.peer in peers:
                connection.send(kind, number, contents)
