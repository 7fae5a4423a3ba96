"""The council: what all members do together, along a spanning tree of links that are up.

Parts rise to the root, the lowest rank that is alive, and the result falls back. When a link ends
in the middle, the news changes everybody's tree and the call is begun again with those left; who
missed the result of a call that the others have finished asks a neighbour for it. A result falls
along the tree that it rose by, also where the tree has changed since: whoever is through may hang
up at once, and that changes the tree of those who still wait.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from matcha.distributed.links.connection import Link, Owner
from matcha.distributed.links.framing import Kind
from matcha.distributed.links.table import LinkTable, Tree
from matcha.distributed.transports.base import Buffer
from matcha.errors import ExchangeError

__all__ = ["Council", "Parts"]

_log = logging.getLogger("matcha.links")

Parts = dict[int, memoryview]
"""What came up the tree, by the child that sent it."""
_KNOWN, _UNKNOWN = b"1", b"0"
_DIGEST = 16  # characters of a tree's digest, before each part
_AGAIN = 1.0  # seconds after which a call that does not end asks whether others have ended it


class Chair(Owner, Protocol):
    """What a council needs of a transport."""

    table: LinkTable
    rank: int

    def live_links(self) -> Sequence[Link]:
        """The links that are up."""

    def anyone_is_away(self) -> bool:
        """Whether somebody said that it does long work alone: then nobody is late."""

    def name(self, rank: int) -> str:
        """How people find a worker."""


class Council:
    """Collective calls of one worker; every member makes the same calls in the same order."""

    def __init__(self, chair: Chair) -> None:
        self._chair = chair
        self.number = 0
        """How many calls this worker has finished; one that comes back takes a neighbour's."""
        self._inbox: dict[tuple[int, int], tuple[str, memoryview]] = {}
        self._found: dict[int, memoryview | None] = {}
        self._askers: dict[int, int] = {}
        self._below: set[int] = set()  # children in any tree that this call was tried along
        self._last: Buffer = b""

    def call(
        self,
        contribute: Callable[[Parts], Sequence[Buffer]],
        conclude: Callable[[Parts, int], Buffer],
        timeout: float,
    ) -> Buffer:
        """One collective call.

        Args:
            contribute: this worker's part joined with its children's, to be sent to its parent.
            conclude: at the root: the result, given the children's parts and the number of members.
            timeout: seconds after which to give up.

        Raises:
            ExchangeError: the members did not all come in time; those missing are named.
        """
        end = time.monotonic() + timeout
        result: Buffer | None = None
        while result is None:
            with self._chair.lock:
                is_over = self.number in self._found
                result = self._found.get(self.number)
            if is_over and result is None:
                # An island that comes back may be several calls behind: it answers them alone.
                _log.warning("call %d was over long ago: answered alone", self.number)
                result = conclude({}, 1)
            elif not is_over:
                result = self._attempt(contribute, conclude, end)
        self._finish(result)
        return result

    def _attempt(
        self,
        contribute: Callable[[Parts], Sequence[Buffer]],
        conclude: Callable[[Parts, int], Buffer],
        end: float,
    ) -> Buffer | None:
        """The result; None when the tree changed on the way, or others have the result."""
        number, chair = self.number, self._chair
        with chair.lock:
            tree = chair.table.tree
            self._below |= {*tree.children}
        if not self._wait(tree, lambda: all(self._part(c, tree) for c in tree.children), end):
            return None
        with chair.lock:
            parts = {child: self._inbox[number, child][1] for child in tree.children}
        digest = tree.digest.encode()
        if tree.parent is None:
            result = conclude(parts, len(tree.members))
        else:
            rising = contribute(parts)
            with chair.lock:
                self._send([tree.parent], Kind.RISE, number, [digest, *rising])
            self._wait(tree, lambda: False, end)  # for the result, which comes from above
            return None
        return result

    def _part(self, child: int, tree: Tree) -> bool:
        found = self._inbox.get((self.number, child))
        return found is not None and found[0] == tree.digest

    def _wait(self, tree: Tree, ready: Callable[[], bool], end: float) -> bool:
        """Wait for something; False when the tree changed or another had the result."""
        chair, number = self._chair, self.number
        asked = time.monotonic() + _AGAIN
        with chair.lock:
            while True:
                if number in self._found:
                    return False
                if ready():
                    return True
                if chair.table.tree.digest != tree.digest:
                    self._ask(number)
                    return False
                now = time.monotonic()
                if now > end and not chair.anyone_is_away():
                    raise ExchangeError(self._missing())
                if now > asked:
                    self._ask(number)
                    asked = now + _AGAIN
                chair.changed.wait(max(0.0, min(end, asked) - now) + 0.01)

    def _ask(self, number: int) -> None:
        everybody = [link.peer for link in self._chair.live_links()]
        self._send(everybody, Kind.MISS, number, [])

    def _finish(self, result: Buffer) -> None:
        with self._chair.lock:
            number = self.number
            self.number += 1
            self._last = result
            asked = {peer for peer, call in self._askers.items() if call == number}
            self._send(asked | self._below, Kind.FOUND, number, [_KNOWN, result])
            self._askers.clear()
            self._below.clear()
            self._found = {n: value for n, value in self._found.items() if n > number}
            self._inbox = {key: value for key, value in self._inbox.items() if key[0] > number}

    def _missing(self) -> str:
        absent = [
            self._chair.name(child)
            for child in self._chair.table.tree.children
            if (self.number, child) not in self._inbox
        ]
        who = ", ".join(absent) or "the members above this worker in the tree"
        return f"{who} did not come to what all workers do together."

    # -- what comes in; the chair's lock is held --------------------------------------------------

    def heard(self, link: Link, kind: Kind, number: int, content: bytearray) -> None:
        """A frame of a collective call."""
        if kind is Kind.FOUND:
            if number >= self.number:
                view = memoryview(content)
                self._found[number] = view[1:] if view[:1] == _KNOWN else None
        elif number < self.number:  # this worker is through: it tells what came out
            known = number == self.number - 1
            link.send(Kind.FOUND, number, [_KNOWN, self._last] if known else [_UNKNOWN])
        elif kind is Kind.MISS:
            self._askers[link.peer] = number
        else:
            digest, part = content[:_DIGEST].decode(), memoryview(content)[_DIGEST:]
            self._inbox[number, link.peer] = digest, part
        self._chair.changed.notify_all()

    def _send(
        self, peers: Collection[int], kind: Kind, number: int, contents: Sequence[Buffer]
    ) -> None:
        for link in self._chair.live_links():
            if link.peer in peers:
                link.send(kind, number, contents)
