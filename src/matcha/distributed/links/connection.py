"""A link: one connection to a neighbour, from its handshake to its end.

When a link ends, everything that was posted on it fails, and the next connection to the same
neighbour is a new link without a past: no message of a meeting that was left out can be mistaken
for one of a later meeting.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from matcha.distributed.links.framing import Channel, ClosedError, Kind
from matcha.distributed.links.news import News
from matcha.distributed.transports.base import Buffer

__all__ = ["Link", "Owner", "Speed", "Ticket"]

_log = logging.getLogger("matcha.links")
_SMALL = 1 << 16  # bytes: a message that comes before it is asked for is kept if it is small
_MOST_KEPT = 1 << 26  # bytes of such messages
_MOST_SAID = 1 << 26  # bytes of a frame that is neither a model nor a part of one
_LARGE = (Kind.STATE, Kind.RISE, Kind.FOUND)
_MEASURED = 1 << 15  # bytes from which on a message's time says something about the link


class Owner(Protocol):
    """Whom a link belongs to: a transport."""

    lock: threading.RLock
    changed: threading.Condition

    def heard(self, link: Link, kind: Kind, tag: int, content: bytearray) -> None:
        """A frame that is not part of an exchange has come; on the reader's thread."""

    def lost(self, link: Link, reason: str) -> None:
        """The link has ended."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One message's way: done once its tensor may be used again."""

    link: Link
    view: memoryview | None = None
    posted: float = 0.0
    done: bool = False

    @property
    def is_done(self) -> bool:
        """Also of what was sent to a neighbour that has said goodbye: it lacks nothing.

        It may do so as soon as it has our message, before our writer knows that it has sent it.
        """
        return self.done or (self.view is None and self.link.finished is not None)


@dataclass(slots=True)
class Speed:
    """How long messages took, newer ones counting more."""

    seconds: float = 0.0
    megabytes: float = 0.0

    def add(self, seconds: float, megabytes: float) -> None:
        """Count one message."""
        self.seconds = 0.9 * self.seconds + seconds
        self.megabytes = 0.9 * self.megabytes + megabytes


@dataclass(eq=False)
class Link:
    """This worker's end of a connection to a neighbour; guarded by its owner's lock."""

    owner: Owner
    peer: int
    channel: Channel
    speed: Speed
    my_next: int | None = None
    """The first iteration whose meetings this worker takes part in here, once it said so."""
    their_next: int | None = None
    is_up: bool = False
    rumour: int = 0
    """The version that others told of while this end did not know yet that the link was up."""
    runs: bool = False
    """Whether the neighbour had a state when the link was made, which it may give."""
    ended: str | None = None
    """Why it has ended, as the end of a sentence about the neighbour; None while it lives."""
    finished: int | None = None
    """The iteration at which the neighbour said that it had finished."""
    state: bytearray | None = None
    is_giving: bool = False
    """Whether a state is on its way from there."""
    is_waited_for: bool = False
    """Whether bytes wait here for this worker to ask for them: silence then means nothing."""
    bytes_sent: int = 0
    _untold: News = field(default_factory=News)
    _queue: deque[tuple[Kind, int, Sequence[Buffer], Ticket | None]] = field(default_factory=deque)
    _posted: dict[int, deque[Ticket]] = field(default_factory=lambda: defaultdict(deque))
    _early: dict[int, deque[bytearray]] = field(default_factory=lambda: defaultdict(deque))
    _kept: int = 0

    def __post_init__(self) -> None:
        self._work = threading.Condition(self.owner.lock)

    def start(self) -> None:
        """Begin to read and write."""
        name = f"matcha-link-{self.peer}"
        self._reader = threading.Thread(target=self._read, name=name, daemon=True)
        self._reader.start()
        threading.Thread(target=self._write, name=name, daemon=True).start()

    def settle(self) -> None:
        """After its end: wait until nothing writes into memory that was posted here any more."""
        self._reader.join(timeout=10.0)

    @property
    def since(self) -> int:
        """The first iteration whose meetings happen on this link: both ends know it."""
        assert self.my_next is not None
        assert self.their_next is not None
        return max(self.my_next, self.their_next)

    # -- for the owner; its lock is held ----------------------------------------------------------

    def send(
        self,
        kind: Kind,
        tag: int = 0,
        contents: Sequence[Buffer] = (),
        ticket: Ticket | None = None,
    ) -> None:
        """Let the writer send a frame; the contents stay untouched until the ticket is done."""
        if self.ended is None:
            self._queue.append((kind, tag, contents, ticket))
            self._work.notify()

    def tell(self, news: News) -> None:
        """Let the writer send news, in one frame with all that is untold when its turn comes."""
        if not news:
            return
        if not self._untold:
            self.send(Kind.NEWS)
        self._untold |= news

    def knows(self, news: News) -> None:
        """The neighbour told this itself: it need not be told."""
        if self._untold:
            self._untold = self._untold.without(news)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits to be sent."""
        return not self._queue

    def receive(self, tag: int, view: memoryview) -> Ticket:
        """Ask for a message."""
        ticket = Ticket(self, view, time.perf_counter())
        early = self._early.get(tag)
        if early:
            content = early.popleft()
            self._kept -= len(content)
            try:
                self._deliver(ticket, content)
            except ClosedError as error:
                self.owner.lost(self, str(error))
        else:
            self._posted[tag].append(ticket)
            if self.is_waited_for:
                self.owner.changed.notify_all()
        return ticket

    def end(self, reason: str) -> None:
        """Nothing comes through here any more."""
        if self.ended is None:
            self.ended = reason
            self._work.notify_all()
            self.channel.shut()

    # -- the two threads --------------------------------------------------------------------------

    def _write(self) -> None:
        try:
            while True:
                with self.owner.lock:
                    while not self._queue and self.ended is None:
                        self._work.wait()
                    if self.ended is not None:
                        return
                    kind, tag, contents, ticket = self._queue[0]
                    if kind is Kind.NEWS:
                        contents, self._untold = [self._untold.encode()], News()
                self.channel.send(kind, tag, contents)
                with self.owner.lock:
                    self._queue.popleft()
                    self.bytes_sent += sum(map(len, contents))
                    if ticket is not None:
                        ticket.done = True
                    if ticket is not None or not self._queue:
                        self.owner.changed.notify_all()
        except ClosedError as error:
            # The other end may have gone after a last word, which is still to be read.
            self._reader.join(timeout=1.0)
            self.owner.lost(self, f"lost its connection ({error})")
        finally:
            self.channel.leave()

    def _read(self) -> None:
        try:
            while True:
                kind, tag, size = self.channel.receive_header()
                if kind is Kind.DATA:
                    self._read_data(tag, size)
                elif kind is not Kind.BEAT:
                    if size > _MOST_SAID and kind not in _LARGE:
                        raise ClosedError(f"sent {size} bytes of {kind.name.lower()}")
                    self.is_giving |= kind is Kind.STATE
                    content = bytearray(size)
                    self.channel.receive_into(memoryview(content))
                    self.owner.heard(self, kind, tag, content)
        except ClosedError as error:
            reason = str(error)
            if self.finished is not None:
                reason = f"finished at iteration {self.finished}"
            self.owner.lost(self, reason)
        except Exception as error:  # a neighbour's nonsense ends its link, not this worker
            _log.warning("worker %d sent what makes no sense: %r", self.peer, error)
            self.owner.lost(self, f"sent what makes no sense ({error!r})")
        finally:
            self.channel.leave()

    def _read_data(self, tag: int, size: int) -> None:
        ticket = self._taken(tag, size)
        if ticket is None:
            content = bytearray(size)
            self.channel.receive_into(memoryview(content))
            with self.owner.lock:
                if self._posted.get(tag):
                    self._deliver(self._posted[tag].popleft(), content)
                else:
                    self._early[tag].append(content)
                    self._kept += size
                    if self._kept > _MOST_KEPT:
                        raise ClosedError("sent far more than was asked for")
            return
        assert ticket.view is not None
        self._check_size(ticket, size)
        started = time.perf_counter()
        self.channel.receive_into(ticket.view)
        with self.owner.lock:
            if size >= _MEASURED:
                self.speed.add(time.perf_counter() - started, size / 1e6)
            ticket.done = True
            self.owner.changed.notify_all()

    def _taken(self, tag: int, size: int) -> Ticket | None:
        """The ticket that a message is for; None where a small one comes before it is asked for."""
        with self.owner.lock:
            while not self._posted.get(tag):
                if size <= _SMALL:
                    return None
                if self.ended is not None:
                    raise ClosedError(self.ended)
                self.is_waited_for = True
                self.owner.changed.wait()
            self.is_waited_for = False
            self.channel.last_heard = time.monotonic()
            return self._posted[tag].popleft()

    def _deliver(self, ticket: Ticket, content: bytearray) -> None:
        assert ticket.view is not None
        self._check_size(ticket, len(content))
        ticket.view[:] = content
        ticket.done = True
        self.owner.changed.notify_all()

    def _check_size(self, ticket: Ticket, size: int) -> None:
        assert ticket.view is not None
        if size != len(ticket.view):
            raise ClosedError(f"sent {size} bytes where {len(ticket.view)} were expected")
