"""The neighborhood: this worker's links as they come and go, and the news that travels on them.

A link agrees on its own, whenever it is made, from which iteration on its two ends meet; so a
worker may be lost, cut off or come back without anybody deciding anything for all.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matcha._io.keys import Keys
from matcha.distributed.links.change import Change
from matcha.distributed.links.connection import Link, Speed
from matcha.distributed.links.framing import Channel, Kind
from matcha.distributed.links.listener import Door, Hello, RefusedError, dial
from matcha.distributed.links.muster import Muster
from matcha.distributed.links.news import News, Note
from matcha.distributed.links.peers import Peers, dials
from matcha.distributed.links.table import FIRST_UP, LinkTable
from matcha.distributed.links.tree_collectives import Council
from matcha.errors import ExchangeError
from matcha.topology import Link as Pair
from matcha.topology import Topology

__all__ = ["Neighborhood"]

_log = logging.getLogger("matcha.links")
_BEATS = 5  # heartbeats within the longest silence
_START_SILENCE = 20.0
_PATIENCE = 0.2  # of the time that a neighbour has been sought: the pause before the next attempt
_LEAST_PAUSE, _MOST_PAUSE = 0.05, 1.0  # seconds; the first of many have many to seek
_UNHURRIED = 1.0  # seconds that news may wait that only a failed start needs


class Neighborhood:
    """Keeps a link to every neighbour whenever there can be one.

    Everything in here is guarded by `lock`; `changed` is notified whenever something is different.

    Args:
        topology: the workers and their links.
        rank: this worker's number.
        peers: where workers can be reached.
        keys: TLS with certificates; None: plain TCP.
        silence: seconds without a sign of life after which a neighbour counts as lost.
        name: how people find a worker.

    Attributes:
        is_running: whether this worker has a state and takes part.
        is_late: whether others took part before this one did: it needs a state first.
        is_behind: whether the others went on for long while this worker was away.
        most_behind: how many iterations that is.
        next_iteration: the first iteration whose round has not begun here.
        asks: neighbours that wait for this worker's state.
        changes: who came and went.
    """

    def __init__(
        self,
        topology: Topology,
        rank: int,
        peers: Peers,
        keys: Keys | None,
        silence: float,
        name: Callable[[int], str],
    ) -> None:
        self.topology, self.rank, self.silence, self.name = topology, rank, silence, name
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.table = LinkTable(rank, topology)
        self._muster = Muster(self.table)
        self._first_ups: dict[Pair, int] = {}
        self._vacant = threading.Condition(self.lock)
        self.council = Council(self)
        self.is_open = True
        self.is_running = False
        self.is_late = False
        self.is_behind = False
        self.most_behind = float("inf")
        self.next_iteration = 0
        self.asks: list[int] = []
        self.changes: list[Change] = []
        self.links: dict[int, Link] = {}
        self.reasons: dict[int, str] = {}
        self.accusations: dict[int, int] = {}
        self.notes: dict[tuple[int, str], Note] = {}
        self.speeds = {peer: Speed() for peer in topology.neighbors(rank)}
        self.door: Door | None = None
        self._members: tuple[int, ...] = (rank,)
        self._cut: set[int] = set()
        self._finished: set[int] = set()
        self._life = secrets.token_hex(8)
        self._network = hashlib.sha256(repr(topology.links).encode()).hexdigest()[:16]
        self._peers, self._keys = peers, keys
        self._context = keys.context(server=False) if keys else None
        self._start()

    @property
    def neighbors(self) -> tuple[int, ...]:
        """Whom this worker shares a link with."""
        return self.topology.neighbors(self.rank)

    def live_links(self) -> Sequence[Link]:
        """The links that are up; the lock is held."""
        return [link for link in self.links.values() if link.is_up]

    def cut(self, peer: int) -> None:
        """End a link and keep it from coming back: a fault on purpose."""
        with self.lock:
            self._cut.add(peer)
            if peer in self.links:
                self.lost(self.links[peer], "was cut off on purpose")

    def mend(self, peer: int) -> None:
        """Let a link that was cut come back."""
        with self.lock:
            self._cut.discard(peer)
            self._vacant.notify_all()

    # -- making links -----------------------------------------------------------------------------

    def _start(self) -> None:
        dialled = [p for p in self.neighbors if dials(self.table.link(p), self._peers) == self.rank]
        if len(dialled) < len(self.neighbors):
            address = self._peers.addresses[self.rank]
            assert address is not None
            self.door = Door(address, self._keys, self._welcome, self._admit)
        for peer in dialled:
            self._thread(self._keep, peer)
        self._thread(self._watch)

    def _thread(self, body: Any, *arguments: Any) -> None:
        threading.Thread(target=body, args=arguments, name="matcha-links", daemon=True).start()

    def _hello(self, peer: int) -> Hello:
        return {
            "rank": self.rank,
            "to": peer,
            "network": self._network,
            "life": self._life,
            "running": self.is_running,
        }

    def _welcome(self, hello: Hello) -> Hello:
        peer = hello.get("rank")
        if peer not in self.speeds:
            raise RefusedError(f"worker {peer!r} is no neighbour")
        if hello.get("network") != self._network:
            raise RefusedError(f"worker {peer} comes with another topology")
        if hello.get("to") != self.rank:
            raise RefusedError(f"worker {peer} looks for worker {hello.get('to')!r}")
        if peer in self._cut or not self.is_open:
            raise RefusedError(f"not now, worker {peer}")
        answer = self._hello(peer)
        hello["mine"] = answer["running"]
        return answer

    def _admit(self, hello: Hello, channel: Channel) -> None:
        self._add_link(int(hello["rank"]), channel, bool(hello["mine"]), bool(hello["running"]))

    def _keep(self, peer: int) -> None:
        """Dial a neighbour whenever there is no link to it."""
        said, since = "", time.monotonic()
        address = self._peers.addresses[peer]
        assert address is not None
        while self.is_open:
            with self.lock:
                while self.is_open and (peer in self.links or peer in self._cut):
                    self._vacant.wait()
                    since = time.monotonic()
                if not self.is_open:
                    return
                hello = self._hello(peer)
            try:
                channel, answer = dial(address, self._keys, self._context, hello, peer)
                self._add_link(peer, channel, hello["running"], bool(answer["running"]))
                said, since = "", time.monotonic()
            except (OSError, ValueError, RefusedError) as error:
                if str(error) != said:
                    said = str(error)
                    text = "worker %d at %s:%d cannot be reached: %s"
                    _log.log(self._loudness(peer), text, peer, *address, said)
                tried = time.monotonic() - since
                time.sleep(min(_MOST_PAUSE, max(_LEAST_PAUSE, _PATIENCE * tried)))

    def _add_link(self, peer: int, channel: Channel, mine: bool, theirs: bool) -> None:
        with self.lock:
            if not self.is_open:  # closed while it dialled: a link that nobody would ever end
                return channel.refuse()
            before = self.links.get(peer)
            if before is not None:
                self.lost(before, "came back on a new connection")
            link = Link(self, peer, channel, self.speeds[peer], runs=theirs)
            self.links[peer] = link
            self._finished.discard(peer)
            if theirs and not mine and not self.is_running:
                self.is_late = True
            if mine == theirs == self.is_running:
                self._say_up(link)
            elif mine != self.is_running:
                self.lost(link, "met this worker while it changed")
            link.start()
            self.changed.notify_all()

    def _say_up(self, link: Link) -> None:
        link.my_next = self.next_iteration
        own = self.table.link(link.peer)
        known = {**self.table.seen(), own: self.table.versions[own]}
        news = News(links=known, notes=self.notes, ready=self._muster.is_ready)
        link.send(Kind.UP, link.my_next, [news.encode()])

    def wait_for_all(self, timeout: float) -> None:
        """Until every link has come up, also those of others: the first call needs everybody.

        Or until a neighbour says that training is under way: then this worker is late.
        """
        now = time.monotonic()
        end, due = now + timeout, now + _UNHURRIED
        with self.lock:
            while not self.is_late and self.table.unseen():
                if (now := time.monotonic()) > end:
                    text = f"{self._missing()} did not come within {timeout:g} s: is it running, "
                    raise ExchangeError(f"{text}and is its address in the peers file right?")
                if now > due:
                    for link in self.links.values():
                        link.tell(News(links=self._first_ups))
                    self._first_ups, due = {}, now + _UNHURRIED
                self.changed.wait(0.2)

    def _missing(self) -> str:
        """Who did not come: neighbours where there are such, else workers of missing links."""
        live = {link.peer for link in self.live_links()}
        near = [peer for peer in self.neighbors if peer not in live]
        down = {rank for link in self.table.unseen() for rank in link}
        return ", ".join(self.name(rank) for rank in near or sorted(down - {self.rank}))

    def anyone_is_away(self) -> bool:
        """Whether a member said that it is away; the lock is held."""
        return any(what == "away" and note[1] and rank in self._members
                   for (rank, what), note in self.notes.items())  # fmt: skip

    # -- what comes in ----------------------------------------------------------------------------

    def heard(self, link: Link, kind: Kind, tag: int, content: bytearray) -> None:
        """A frame that is no message of an exchange; called by a link's reader."""
        with self.lock:
            if link.ended is not None:
                return
            if kind is Kind.UP:
                self._hear_up(link, tag, News.decode(content))
            elif kind is Kind.NEWS:
                self._hear_news(link, News.decode(content))
            elif kind is Kind.ASK:
                self.asks.append(link.peer)
            elif kind is Kind.STATE:
                link.state = content
            elif kind is Kind.BYE:
                link.finished = int(content)
            else:
                self.council.heard(link, kind, tag, content)
            self.changed.notify_all()

    def _all_are_far_ahead(self) -> bool:
        """Whether every neighbour there is was far ahead when its link came up, as after a stop.

        A link from before the stop may outlive the first new one for a moment, and is not ahead.
        """
        most = self.next_iteration + self.most_behind
        live = self.live_links()
        return bool(live) and all((link.their_next or 0) > most for link in live)

    def _hear_up(self, link: Link, their_next: int, news: News) -> None:
        link.their_next = their_next
        if link.my_next is None:
            return
        link.is_up = True
        self.is_behind |= self._all_are_far_ahead()
        own = self.table.link(link.peer)
        version = self.table.raise_link(link.peer, news.links[own])
        self.tell(News(links={own: version}))
        self._hear_rumour(link)
        self._hear_news(link, news)
        self._note_members()

    def _hear_news(self, link: Link | None, news: News) -> None:
        """Take what is new, and tell it on; from a neighbour, or this worker's own."""
        if link is not None:
            link.knows(news)
            if news.ready:
                self._muster.hear(link.peer)
        unseen = dict.fromkeys(self.table.unseen(), FIRST_UP) if news.complete else {}
        links = self.table.merge(self._certain({**unseen, **news.links}))
        accused = {k: v for k, v in news.accused.items() if k not in self.accusations}
        self.accusations |= accused
        notes = self._hear_notes(news.notes)
        complete = self._muster.ends()
        fresh = News(links=links, accused=accused, notes=notes, complete=complete)
        self.tell(fresh, link, news)
        if links:
            self._note_members()
        self._count()

    def _hear_rumour(self, link: Link) -> None:
        """Take what others told of a link in the making, now that it is up or has failed."""
        if link.rumour:
            self._hear_news(None, News(links={self.table.link(link.peer): link.rumour}))

    def _certain(self, versions: dict[Pair, int]) -> dict[Pair, int]:
        """Versions without those of links in the making, of which others may know more."""
        for link in self.links.values():
            if link.my_next is not None and not link.is_up:
                link.rumour = max(link.rumour, versions.pop(self.table.link(link.peer), 0))
        return versions

    def _count(self) -> None:
        """Go on with the muster."""
        if self._muster.advance():
            above = self._muster.parent
            if above is None:
                self._hear_news(None, News(complete=True))
            elif above in self.links:  # if not, it hears so when that link comes up again
                self.links[above].tell(News(ready=True))

    def _hear_notes(self, notes: Mapping[tuple[int, str], Note]) -> dict[tuple[int, str], Note]:
        """Take what workers noted about themselves, and return what is new, to be told on."""
        fresh = {}
        for (rank, what), note in notes.items():
            if note[0] > self.notes.get((rank, what), (0, ""))[0]:
                self.notes[rank, what] = note
                if rank == self.rank:  # of a process that had this place before
                    self.note(what, "")
                else:
                    fresh[rank, what] = note
        return fresh

    def note(self, what: str, value: str) -> None:
        """Let everybody know something about this worker; the lock is held."""
        version = self.notes.get((self.rank, what), (0, ""))[0] + 1
        self.notes[self.rank, what] = version, value
        self.tell(News(notes={(self.rank, what): (version, value)}))

    def tell(self, news: News, source: Link | None = None, heard: News | None = None) -> None:
        """Send news to every neighbour, which tells on what is new to it; not back to its source.

        That a link is up for the first time may wait: the muster counts them.
        """
        first = {pair: version for pair, version in news.links.items() if version == FIRST_UP}
        if first:
            self._first_ups |= first
            news = news.without(News(links=first))
        for link in self.links.values() if news else ():
            if link.my_next is not None:  # it was told all that was known when it came up
                link.tell(news.without(heard) if link is source and heard else news)

    def lost(self, link: Link, reason: str) -> None:
        """A link has ended; called by its threads and by the watch."""
        with self.lock:
            if link.ended is not None:
                return
            link.end(reason)
            self.reasons[link.peer] = reason
            if link.finished is not None:
                self._finished.add(link.peer)
            if self.links.get(link.peer) is link:
                del self.links[link.peer]
                self._vacant.notify_all()
                if link.is_up and self.is_open:
                    text = "worker %d: link to worker %d ended: it %s"
                    _log.log(self._loudness(link.peer), text, self.rank, link.peer, reason)
                    version = self.table.lower_link(link.peer)
                    self.tell(News(links={self.table.link(link.peer): version}))
                    self._note_members()
                    self.is_behind |= self._all_are_far_ahead()
                elif self.is_open:
                    self._hear_rumour(link)
            self.changed.notify_all()

    def _loudness(self, peer: int) -> int:
        """How loud to be about a neighbour: that one which has finished is gone is no news."""
        return logging.DEBUG if peer in self._finished else logging.INFO

    def drop_all(self, reason: str) -> None:
        """End every link; those that should be there come back as new ones."""
        for link in list(self.links.values()):
            self.lost(link, reason)

    def _note_members(self) -> None:
        before, now = set(self._members), set(self.table.members)
        self._members = self.table.members
        for worker in sorted(before ^ now):
            change = Change(
                iteration=self.next_iteration,
                seconds=time.monotonic(),
                worker=worker,
                is_member=worker in now,
            )
            self.changes.append(change)
            if self.is_running:
                verb = "is here" if change.is_member else "is gone"
                _log.info(
                    "worker %d: worker %d %s (iteration %d, %d of %d members)",
                    self.rank, worker, verb, change.iteration, len(now), self.topology.num_workers,
                )  # fmt: skip

    def _watch(self) -> None:
        """Send signs of life and look for those of others."""
        while self.is_open:
            time.sleep(self.silence / _BEATS)
            revoked = self._keys.revoked() if self._keys else frozenset()
            now = time.monotonic()
            with self.lock:
                for link in list(self.links.values()):
                    quiet = now - link.channel.last_heard
                    # While workers start, imports and first calls may hold one up for long.
                    most = self.silence if self.is_running else max(self.silence, _START_SILENCE)
                    if quiet > most and not link.is_waited_for:
                        self.lost(link, f"gave no sign of life for {quiet:.1f} s")
                    elif link.channel.fingerprint in revoked:
                        self.lost(link, "showed a certificate that is now revoked")
                    elif link.is_idle:
                        link.send(Kind.BEAT)

    def close(self) -> None:
        """Say goodbye and end all links."""
        with self.lock:
            if not self.is_open:
                return
            self.is_open = False
            self._vacant.notify_all()
            for link in self.links.values():
                link.send(Kind.BYE, 0, [str(self.next_iteration).encode()])
            end = time.monotonic() + 2.0
            while any(not li.is_idle for li in self.links.values()) and time.monotonic() < end:
                self.changed.wait(0.1)
            for link in self.links.values():
                link.channel.finish()
            while self.links and time.monotonic() < end:  # until the others have read it all
                self.changed.wait(0.1)
            self.drop_all("has finished")
        if self.door is not None:
            self.door.close()
