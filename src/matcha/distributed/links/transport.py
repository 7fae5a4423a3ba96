"""LinkTransport: one connection per link of the topology, for networks that are not trusted.

A worker's phases are those of `link_state.Phase`. Each connection agrees on its own, whenever it is
made, from which iteration on its two ends meet (`LinkState`): a worker may be lost, cut off or come
back without a decision for all. When others join or leave for good, `grow` changes the links.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TypeVar

from matcha._io.keys import Keys
from matcha.distributed.links.connection import Connection, LinkState, MessageTransfer, Transfers
from matcha.distributed.links.framing import FrameStream, Kind
from matcha.distributed.links.joining import come_again
from matcha.distributed.links.link_state import (
    FIRST_UP,
    LinkVersions,
    MembershipChange,
    Notes,
    Phase,
    Update,
    max_update_bytes,
)
from matcha.distributed.links.listener import (
    Answer,
    Hello,
    Listener,
    RefusedError,
    Revocations,
    dial,
    keep_running,
)
from matcha.distributed.links.peers import Peers, Team, dials, in_words
from matcha.distributed.links.tree_collectives import TreeCollectives
from matcha.distributed.transports.base import (
    Buffer,
    Combine,
    Conclude,
    Message,
    Pending,
    Transport,
)
from matcha.errors import ExchangeError, InputError, PeerLostError
from matcha.topology import Link, Topology

__all__ = ["LinkTransport", "Phase"]

T = TypeVar("T")

_log = logging.getLogger("matcha.links")
_HEARTBEATS = 5  # within the timeout of a neighbour, where one is given
_HEARTBEAT = 0.25  # seconds, where none is
_RETURNS = 3.0  # seconds within which a lost worker that lives is back
_LAST_WORDS = 0.5  # seconds in which a former neighbour should have read what was sent to it
_UNHURRIED = 1.0  # seconds that an update may wait which only a failed start needs
_PAUSE_SHARE = 0.2  # the pause before dialling again, as a share of the time since the first try
_MIN_PAUSE, _MAX_PAUSE = 0.05, 1.0  # seconds
_MIN_LIMIT, _NO_LIMIT = 1 << 26, 1 << 32  # bytes of a collective call or a state


class LinkTransport(Transport):
    """Messages over one TCP connection per link of the topology, and no other connection.

    Making one waits until all links are up, or until a neighbour says that training is under way
    (`needs_state`): then this worker takes a neighbour's state first, as `Gossip` does.

    `lock` guards everything in here; `changed` is notified whenever something is different.

    Args:
        topology: The workers and their links.
        rank: This worker's number.
        peers: Where workers can be reached.
        keys: TLS 1.3 with a certificate per worker; None is plain TCP, for trusted networks.
        timeout: Seconds without a sign of life after which a neighbour counts as lost; None: twice
            the median of its longest gaps so far and four deviations, and a second at least.
        start_timeout: Seconds to wait for all workers at the start.
        team: What a worker that joins was told of the team, in place of the first topology's.

    Raises:
        ExchangeError: Workers did not come in time; the message names them.
    """

    threads = True
    has_tree = True

    def __init__(
        self,
        topology: Topology,
        rank: int,
        peers: Peers,
        *,
        keys: Keys | None = None,
        timeout: float | None = None,
        start_timeout: float = 300.0,
        team: Team | None = None,
    ) -> None:
        if topology.directed:  # a connection carries both ways, whatever messages travel on it
            pairs = {(min(link), max(link)) for link in topology.links}
            topology = Topology.from_links(sorted(pairs), topology.num_workers)
        if team is None:
            peers.check(topology)
        self.team = team or Team.first(topology, peers)
        if not 0 <= rank < topology.num_workers:
            raise InputError(f"there is no worker {rank} among {topology.num_workers}.")
        self.rank, self.num_workers = rank, topology.num_workers
        self.phase = Phase.STARTING if team is None else Phase.NEEDS_STATE
        self.sponsor: Answer = lambda _: come_again
        """Answers workers that want to join."""
        self.may_grow = team is not None
        """Whether there may be workers unknown to this one."""
        self.is_changing = False
        """Whether the team is about to change here too."""
        self.is_behind = False
        """Whether this worker was away for so long that it should take another's state."""
        self.max_lag = float("inf")
        """How many iterations behind all its neighbours a worker may go on by itself."""
        self.next_iteration = 0
        """The first iteration whose round has not begun here."""
        self.patience = timeout
        """Seconds without a sign of life after which a neighbour counts as lost."""
        self.finds_cause = True
        """Whether the error for a lost neighbour names the first cause, which takes time."""
        self.barred: set[int] = set()
        """Neighbours to which this worker makes no connection, as if the link were cut."""
        self.state_requests: set[int] = set()
        """Neighbours that wait for this worker's state."""
        self.news = threading.Event()
        """Set when notes have come."""
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.versions = LinkVersions(rank, topology)
        self.versions.grow(topology, self.team.gone)
        known = self.live_connections, self.anyone_is_away, self._may_return, self.name
        self.collectives = TreeCollectives(self.changed, self.versions, *known)
        self.connections: dict[int, Connection] = {}
        self.listener: Listener | None = None
        self._keys, self.has_keys = keys, keys is not None
        self._neighbors = self.team.neighbors(rank)
        self._model_bytes, self._limits = 0, dict[Kind, int]()
        self._set_limits()
        self._vacant = threading.Condition(self.lock)
        self._members: tuple[int, ...] = (rank,)
        self._changes: list[MembershipChange] = []
        self._notes, self._first_ups = Notes(rank), dict[Link, int]()
        self._end_reasons: dict[int, str] = {}
        self._finished: dict[int, Connection] = {}
        self._revocations = Revocations(keys)
        self._context = keys.context(server=False) if keys else None
        try:
            self._connect(self._neighbors)
            self._start_thread("matcha-watch", self._watch)
            self._wait_for_all(start_timeout)
        except BaseException:
            self.close()
            raise

    # -- what others see --------------------------------------------------------------------------

    @property
    def members(self) -> tuple[int, ...]:
        """The workers within reach over links that are up, this one included."""
        with self.lock:
            return self.versions.members

    @property
    def changes(self) -> tuple[MembershipChange, ...]:
        """The workers that came and went so far, as this worker learnt it."""
        with self.lock:
            return tuple(self._changes)

    @property
    def needs_state(self) -> bool:
        """Whether others train already and this worker needs a state."""
        return self.phase is Phase.NEEDS_STATE

    def live_connections(self) -> list[Connection]:
        """The connections over which meetings happen; the caller holds the lock."""
        return [connection for connection in self.connections.values() if connection.is_up]

    def num_sockets(self) -> int:
        """How many sockets are open, the one that listens included."""
        return len(self.connections) + (self.listener is not None)

    def expect_model(self, num_bytes: int) -> None:
        """Refuse frames that a model of this size cannot explain."""
        self._model_bytes = num_bytes
        self._set_limits()

    def _set_limits(self) -> None:
        """Allow for what can be said of links, and a model with what grows with it, no more."""
        update, large = max_update_bytes(self.team.topology, may_grow=self.may_grow), _NO_LIMIT
        if self._model_bytes:  # the optimizer's moments, and what wires remember per neighbour
            large = _MIN_LIMIT + (16 + 4 * len(self._neighbors)) * self._model_bytes
        self._limits |= dict.fromkeys((Kind.UP, Kind.UPDATE), update)
        self._limits |= dict.fromkeys((Kind.REDUCE, Kind.RESULT, Kind.STATE), large)

    # -- messages ---------------------------------------------------------------------------------

    def post(self, messages: Sequence[Message]) -> Pending:
        """Start the messages on their connections."""
        transfers: list[tuple[int, MessageTransfer | str]] = []
        with self.lock:
            for m in messages:
                if m.incoming is not None:
                    # What a neighbour sent before it finished has arrived, and still counts.
                    way = self._connection_to(m.peer) or self._finished.get(m.peer)
                    started = way.receive(m.tag, m.incoming) if way else self.end_reason(m.peer)
                    transfers.append((m.peer, started))
            for m in messages:
                if m.outgoing is not None:
                    way = self._connection_to(m.peer)
                    started = way.send_data(m.tag, m.outgoing) if way else self.end_reason(m.peer)
                    transfers.append((m.peer, started))
        return Transfers(transfers, self.anyone_is_away, self.lost_error)

    def _connection_to(self, peer: int) -> Connection | None:
        if peer not in self._neighbors:
            raise ExchangeError(f"{self.name(peer)} is not a neighbour of this worker.")
        connection = self.connections.get(peer)
        return connection if connection is not None and connection.is_up else None

    def lost_error(self, peer: int, problem: str, patience: float) -> PeerLostError:
        """The error for a neighbour that failed us."""
        if self.finds_cause:
            return PeerLostError(str(self.failure(peer, problem, patience)), peer)
        return PeerLostError(f"{self.name(peer)} {problem}.", peer)

    def refuse(self, peer: int, problem: str) -> PeerLostError:
        """End the link on which a message came that must not be used."""
        with self.lock:
            connection = self.connections.get(peer)
            if connection is not None:
                _log.warning("worker %d %s", peer, problem)
                self._end(connection, problem)
        if connection is not None:
            connection.join_reader()  # it may be writing the next message
        return PeerLostError(f"{self.name(peer)} {problem}.", peer)

    def end_reason(self, peer: int) -> str:
        """Why a neighbour's last connection ended, as the end of a sentence."""
        return self._end_reasons.get(peer, "cannot be reached")

    def set_note(self, key: str, value: str) -> None:
        """Send it to all workers, from neighbour to neighbour."""
        with self.lock:
            self._tell(Update(notes=self._notes.set(key, value)))
        self.news.set()

    def get_note(self, rank: int, key: str) -> str:
        """What has arrived of it."""
        with self.lock:
            return self._notes.get(rank, key)

    def get_notes(self, kind: str, *, everyone: bool = False) -> dict[tuple[int, str], str]:
        """What members, or all workers, noted under keys that begin so, by worker and the rest."""
        with self.lock:
            return self._notes.find(kind, None if everyone else self.versions.members)

    def report_waiting_on(self, peer: int | None) -> None:
        """Publish it for good: a worker that gave up on a peer does not take that back."""
        if peer is not None:
            super().report_waiting_on(peer)

    def tree_call(
        self, combine: Combine, conclude: Conclude, read: Callable[[Buffer], T], timeout: float
    ) -> T:
        """One collective call of all members."""
        return self.collectives.call(combine, conclude, read, timeout)  # type: ignore[return-value]

    def _may_return(self) -> list[int]:
        """Workers that were lost only a moment ago, without a goodbye; the lock is held."""
        recent = time.monotonic() - min(_RETURNS, 2 * (self.patience or _RETURNS))
        last = {change.worker: change for change in self.changes}
        lost = {w for w, change in last.items() if not change.is_member and change.seconds > recent}
        finished = f"finished/{self.period}"
        return [w for w in lost - self.team.gone if not self.get_note(w, finished)]

    # -- meetings and states ----------------------------------------------------------------------

    def start_at(self, iteration: int) -> None:
        """Take part from an iteration on: this worker has a state."""
        with self.lock:
            needed_state = self.needs_state
            self.next_iteration, self.is_behind = iteration, False
            self.phase = Phase.RUNNING
            if needed_state:  # what was agreed on these connections belongs to another state
                self._end_all("starts again with a state")

    def begin(self, iteration: int) -> None:
        """Say, before its first meeting, that an iteration's round has begun here."""
        with self.lock:
            self.next_iteration = iteration + 1

    def meets(self, peer: int, iteration: int) -> bool:
        """Whether the link to a neighbour is up for the meetings of an iteration; both ends agree.

        While the other end has yet to say from which iteration on it takes part, this waits.
        """
        with self.lock:
            while True:
                connection = self.connections.get(peer)
                if connection is None or connection.state is LinkState.CONNECTING:
                    return False
                if connection.is_up:
                    return iteration >= connection.first_iteration
                self.changed.wait(_UNHURRIED)

    def connection(self, peer: int) -> object:
        """The connection to a neighbour; another one after each break."""
        with self.lock:
            return self.connections.get(peer)

    def leave(self) -> None:
        """Stop taking part: this worker fell far behind and needs a state like a new one."""
        with self.lock:
            self.phase = Phase.NEEDS_STATE
            self._end_all("takes a newer state")

    def start_over(self, why: str) -> None:
        """Leave the meetings under way, and take another's state when the iteration ends."""
        with self.lock:
            self.is_behind = True
            self._end_all(why)

    # -- making connections -----------------------------------------------------------------------

    def _connect(self, neighbors: Collection[int]) -> None:
        """Dial the neighbours that this worker dials, and listen for the others."""
        dialled = [p for p in neighbors if self._dials(p) == self.rank]
        if len(dialled) < len(neighbors):
            self._listen()
        for peer in dialled:
            self._start_thread(f"matcha-dial-{peer}", partial(self._keep_dialling, peer), peer)

    def _keep_dialling(self, peer: int) -> None:
        """Dial a neighbour whenever a connection to it is missing, until this worker ends."""
        address = self.team.peers.addresses[peer]
        assert address is not None
        failing_since, known = None, ""
        while (hello := self._wanted(peer)) is not None:
            try:
                stream, answer = dial(address, self._context, self._revocations, hello)
            except (OSError, ValueError, RefusedError) as error:
                now = time.monotonic()
                if str(error) != known:
                    known, where = str(error), in_words(address)
                    text = "worker %d at %s cannot be reached: %s"
                    _log.log(self._log_level(peer), text, peer, where, error)
                failing_since = failing_since or now
                pause = _PAUSE_SHARE * (now - failing_since)
                time.sleep(min(_MAX_PAUSE, max(_MIN_PAUSE, pause)))
            else:
                failing_since, known = None, ""
                self._add_connection(stream, hello, answer)

    def _dials(self, peer: int) -> int | None:
        """Which end of a link dials; None where neither can be reached, in a team that changed."""
        try:
            return dials(self.versions.link(peer), self.team.peers)
        except InputError as error:
            if not self.team.stage:
                raise
            _log.warning("worker %d has no link to worker %d: %s", self.rank, peer, error)
            return None

    def _listen(self) -> None:
        address = self.team.peers.addresses[self.rank]
        if self.listener is None and address is not None:
            calls = self._welcome, self._add_connection, lambda request: self.sponsor(request)
            self.listener = Listener(address, self._keys, self._revocations, *calls)

    def take_newcomers(self, sponsor: Answer) -> None:
        """Let others in: listen where no neighbour dials, too, and hear of further workers."""
        self.sponsor, self.may_grow = sponsor, True
        self._set_limits()
        self._listen()

    def grow(self, team: Team) -> None:
        """Go on with the workers and links of a team that has changed."""
        with self.lock:
            before, self.team = self._neighbors, team
            self._neighbors = team.neighbors(self.rank)
            # One that leaves may still wait for the result of the call in which all changed.
            former = {*self.connections} - self._neighbors
            ending = [self.connections[peer] for peer in former]
            self._hang_up(ending, "is no neighbour any more", _LAST_WORDS)
            self.collectives.forget(team.gone)
            self.num_workers = team.topology.num_workers
            self._set_limits()
            self._on_update(None, Update(links=self.versions.grow(team.topology, team.gone)))
            self._vacant.notify_all()
            self._note_members()
        self._connect(self._neighbors - before)

    def _start_thread(self, name: str, step: Callable[[], None], peer: int | None = None) -> None:
        def is_open() -> bool:
            return self.phase is not Phase.CLOSED and (peer is None or peer in self._neighbors)

        threading.Thread(target=keep_running, args=(step, is_open), name=name, daemon=True).start()

    def _wanted(self, peer: int) -> Hello | None:
        """Wait until a connection to a neighbour is missing: what to say, None if closed."""
        with self.lock:
            while self.phase is not Phase.CLOSED and peer in self._neighbors:
                if peer not in self.connections and peer not in self.barred:
                    return self._hello(peer)
                self._vacant.wait()
        return None

    def _hello(self, peer: int) -> Hello:
        running, team = self.phase is Phase.RUNNING, self.team
        return Hello(
            rank=self.rank, to=peer, network=team.network, running=running, stage=team.stage
        )

    def _welcome(self, hello: Hello) -> Hello:
        if hello.rank not in self._neighbors:
            raise RefusedError(f"worker {hello.rank} is not a neighbour")
        if hello.network != self.team.network:
            raise RefusedError(f"worker {hello.rank} comes with another topology")
        if hello.to != self.rank:
            raise RefusedError(f"worker {hello.rank} looks for worker {hello.to}")
        if hello.rank in self.barred or self.phase is Phase.CLOSED:
            raise RefusedError(f"not now, worker {hello.rank}")
        return self._hello(hello.rank)

    def _add_connection(self, stream: FrameStream, ours: Hello, other: Hello) -> None:
        """Take over a new connection; its ends said in their hellos whether they train."""
        peer, mine, theirs = ours.to, ours.running, other.running
        with self.lock:
            if self.phase is Phase.CLOSED:  # while it was made: nothing would ever end it
                return stream.refuse()
            if mine and theirs and ours.stage != other.stage:  # one of them missed a change
                self.is_behind |= not self.is_changing and self.team.stage < other.stage
                return stream.refuse()
            before = self.connections.get(peer)
            if before is not None:
                self._end(before, "came back on a new connection")
            guard = self.lock, self.changed, self._limits
            connection = Connection(peer, stream, *guard, self._on_frame, self._end, theirs)
            self.connections[peer] = connection
            self._finished.pop(peer, None)
            running = self.phase is Phase.RUNNING
            if theirs and not mine and not running:
                self.phase = Phase.NEEDS_STATE
            if mine == theirs == running:
                self._agree(connection)
            elif mine != running:
                self._end(connection, "met this worker while it changed")
            connection.start()
            self.changed.notify_all()

    def _agree(self, connection: Connection) -> None:
        """Say from which iteration on this worker takes part, and all that it knows."""
        connection.enter(LinkState.AGREEING)
        connection.first_iteration = self.next_iteration
        own = self.versions.link(connection.peer)
        known = {**self.versions.seen(), own: self.versions.versions[own]}
        update = Update(links=known, notes=self._notes.all)
        connection.send(Kind.UP, self.next_iteration, [update.encode()])

    def _wait_for_all(self, timeout: float) -> None:
        """Return once every link has been up, also those of others, or when others train already.

        Telling all workers about each link would take links times links messages. So each worker
        waits for its own links, and then all make a first collective call.
        """
        end = time.monotonic() + timeout
        with self.lock:
            while not (self.needs_state or all(map(self.versions.has_been_up, self._neighbors))):
                if time.monotonic() > end:
                    raise ExchangeError(self._missing(timeout))
                self.changed.wait(0.2)
        try:
            left = end - time.monotonic()
            over = self.collectives.call(
                lambda _: (), lambda *_: b"", lambda _: True, left, lambda: self.needs_state
            )
        except ExchangeError:
            raise ExchangeError(self._missing(timeout)) from None
        if over:
            with self.lock:
                self.versions.complete()
                self._note_members()

    def _missing(self, timeout: float) -> str:
        """Name the missing workers: neighbours first, else the ends of missing links."""
        near = sorted(self._neighbors - {each.peer for each in self.live_connections()})
        far = {rank for link in self.versions.unseen() for rank in link} - {self.rank}
        names = ", ".join(map(self.name, near or sorted(far)))
        return (
            f"{names} did not come within {timeout:g} s: is it running, "
            "and is its address in the peers file right?"
        )

    # -- frames that arrive -----------------------------------------------------------------------

    def _on_frame(self, connection: Connection, kind: Kind, tag: int, content: bytearray) -> None:
        """Handle a frame that is not part of an exchange; what it raises ends the connection."""
        update = Update()
        if kind in (Kind.UP, Kind.UPDATE):
            update = Update.decode(content, self.team.topology, may_grow=self.may_grow)
        with self.lock:
            if connection.state is LinkState.ENDED:
                return
            if kind is Kind.ASK_STATE:
                self.state_requests |= {connection.peer}
            elif kind is Kind.STATE:
                connection.given_state = content
            elif kind is Kind.GOODBYE:
                if not content.isdigit():
                    raise ValueError(f"{bytes(content)!r} is not an iteration")
                connection.finished_at = int(content)
            elif kind is Kind.UP and connection.state is LinkState.AGREEING:
                self._on_up(connection, tag, update)
            elif not connection.is_up or kind is Kind.UP:
                raise ValueError(f"{kind.name} while the link is {connection.state.value}")
            elif kind is Kind.UPDATE:
                self._on_update(connection, update)
            else:
                self.collectives.on_frame(connection, kind, tag, content)
            self.changed.notify_all()

    def _on_up(self, connection: Connection, their_first: int, update: Update) -> None:
        own = self.versions.link(connection.peer)
        if own not in update.links:
            raise ValueError(f"UP that does not say what it knows of {own}")
        connection.enter(LinkState.UP)
        connection.their_first = their_first
        connection.first_iteration = max(connection.first_iteration, their_first)
        self.is_behind |= self._all_are_far_ahead()
        version = self.versions.raise_link(connection.peer, update.links[own])
        self._tell(Update(links={own: version}))
        self._on_heard_version(connection)
        self._on_update(connection, update)
        self._note_members()

    def _all_are_far_ahead(self) -> bool:
        """Whether every neighbour was far ahead when its connection came up, as after a stop."""
        # One from before the stop may outlive the first new one for a moment, and is not ahead.
        live = self.live_connections()
        most = self.next_iteration + self.max_lag
        return bool(live) and all(connection.their_first > most for connection in live)

    def _on_update(self, connection: Connection | None, update: Update) -> None:
        """Take what is new, and send it on; from a neighbour, or this worker's own."""
        if connection is not None:
            connection.forget_known(update)
        links = self.versions.merge(self._without_agreeing(update.links))
        notes, stale = self._notes.merge(update.notes)
        self._tell(Update(links=links, notes=notes), connection, update)
        if notes:
            self.news.set()
        for key in stale:  # of a process that had this rank before
            self.set_note(key, "")
        if links:
            self._note_members()

    def _without_agreeing(self, versions: Mapping[Link, int]) -> dict[Link, int]:
        """Versions without those of links in the making, of which others may know more."""
        rest = dict(versions)
        for connection in self.connections.values():
            if connection.state is LinkState.AGREEING:
                heard = rest.pop(self.versions.link(connection.peer), 0)
                connection.heard_version = max(connection.heard_version, heard)
        return rest

    def _on_heard_version(self, connection: Connection) -> None:
        """Take what others told of a link in the making, now that it is up or has failed."""
        if connection.heard_version:
            link = self.versions.link(connection.peer)
            self._on_update(None, Update(links={link: connection.heard_version}))

    def _tell(
        self, update: Update, source: Connection | None = None, heard: Update | None = None
    ) -> None:
        """Send an update to every neighbour, but not back to its source.

        That a link is up for the first time may wait: the first collective call counts them.
        """
        first = {pair: version for pair, version in update.links.items() if version == FIRST_UP}
        self._first_ups |= first
        update = update.without(Update(links=first))
        for connection in self.connections.values() if update else ():
            if connection.state is not LinkState.CONNECTING:  # then UP will tell all
                known = heard if connection is source and heard else Update()
                connection.tell(update.without(known))

    # -- connections that end ---------------------------------------------------------------------

    def _end(self, connection: Connection, reason: str) -> None:
        with self.lock:
            if connection.state is LinkState.ENDED:
                return
            was, peer = connection.state, connection.peer
            connection.end(reason)
            self._end_reasons[peer] = reason
            if connection.finished_at is not None:
                self._finished[peer] = connection
            if self.connections.get(peer) is connection:
                del self.connections[peer]
                self._vacant.notify_all()
                if was is LinkState.UP and self.phase is not Phase.CLOSED:
                    text = "worker %d: link to worker %d ended: it %s"
                    _log.log(self._log_level(peer), text, self.rank, peer, reason)
                    version = self.versions.lower_link(peer)
                    self._tell(Update(links={self.versions.link(peer): version}))
                    self._note_members()
                    self.is_behind |= self._all_are_far_ahead()
                elif self.phase is not Phase.CLOSED:
                    self._on_heard_version(connection)
            self.changed.notify_all()

    def _end_all(self, reason: str) -> None:
        """End every connection; those that should be there come back as new ones."""
        for connection in list(self.connections.values()):
            self._end(connection, reason)

    def _hang_up(self, connections: Sequence[Connection], reason: str, seconds: float) -> None:
        """Say goodbye on connections, and end them once the others have read it, or too late."""
        end, ended = time.monotonic() + seconds, LinkState.ENDED
        for each in connections:
            each.send(Kind.GOODBYE, 0, [str(self.next_iteration).encode()])
        self.changed.wait_for(lambda: all(each.is_idle for each in connections), seconds)
        for each in connections:
            each.stream.finish()
        left = end - time.monotonic()
        self.changed.wait_for(lambda: all(each.state is ended for each in connections), left)
        for each in connections:
            self._end(each, reason)

    def _log_level(self, peer: int) -> int:
        """It is no surprise that a neighbour which has finished cannot be reached."""
        return logging.DEBUG if peer in self._finished else logging.INFO

    def _note_members(self) -> None:
        before, now = {*self._members}, {*self.versions.members}
        self._members, seconds = self.versions.members, time.monotonic()
        for worker in sorted(before ^ now):
            self._changes.append(
                MembershipChange(self.next_iteration, seconds, worker, is_member=worker in now)
            )
            if self.phase is Phase.RUNNING:
                _log.info(
                    "worker %d: worker %d %s (iteration %d, %d of %d members)",
                    self.rank, worker, "is here" if worker in now else "is gone",
                    self.next_iteration, len(now), self.num_workers,
                )  # fmt: skip

    def anyone_is_away(self) -> bool:
        """Whether a member said that it does long work alone; the caller holds the lock."""
        return any(self._notes.get(member, "away") for member in self._members)

    def _watch(self) -> None:
        """Send signs of life and look for those of others."""
        pause = min(self.patience / _HEARTBEATS, _UNHURRIED) if self.patience else _HEARTBEAT
        started = time.monotonic()
        time.sleep(pause)
        # A worker that was held up itself has not read what the others sent meanwhile.
        delay = time.monotonic() - started - pause
        revoked = self._revocations.current()
        with self.lock:
            running = self.phase is Phase.RUNNING
            for connection in list(self.connections.values()):
                fault = connection.find_fault(self.patience, delay, revoked, running=running)
                if fault is not None:
                    self._end(connection, fault)
                elif connection.is_idle:
                    connection.send(Kind.HEARTBEAT)
            first, self._first_ups = Update(links=self._first_ups), {}
            if self.phase is Phase.STARTING:  # only a start that fails needs it, for its message
                for connection in self.connections.values():
                    connection.tell(first)

    def close(self) -> None:
        """Say goodbye and end all connections."""
        with self.lock:
            if self.phase is Phase.CLOSED:
                return
            self.phase = Phase.CLOSED
            self._vacant.notify_all()
            self._hang_up([*self.connections.values()], "has finished", 2.0)
            self._end_all("has finished")  # what came up meanwhile
        if self.listener is not None:
            self.listener.close()
