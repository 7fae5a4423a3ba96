"""Connection: one connection to a neighbour, from the exchange of hellos to its end.

`LinkTransport` moves a connection from state to state, under its lock:

    CONNECTING ──▶ AGREEING ──▶ UP
         │            │          │
         └────────────┴──────────┴──▶ ENDED

    CONNECTING  Both ends have said hello. If one of them trains and the other has no state, it
                stays so: the state travels here, and the next connection is for training.
    AGREEING    Both ends train, or neither does yet. This one has said from which iteration on it
                takes part (UP) and waits for the other's answer.
    UP          Both have: meetings happen from the later of the two iterations on.
    ENDED       Everything that was posted fails. The next connection to the same neighbour starts
                without a past: no message of a meeting that was left out can be mistaken for one
                of a later meeting.

Frames are checked here. A neighbour's fault ends its connection, with a reason, and nothing else.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from matcha.distributed.links.framing import ClosedError, FrameStream, Kind
from matcha.distributed.links.link_state import Update
from matcha.distributed.transports.base import MAX_TAG, Buffer, Pending
from matcha.distributed.transports.waiting import Durations
from matcha.errors import PeerLostError

_log = logging.getLogger("matcha.links")
_SMALL = 1 << 16  # bytes of a message that is kept if it arrives before its receive is posted
_MAX_EARLY_BYTES, _MAX_EARLY = 1 << 26, 1 << 14  # of such messages: bytes, and how many
_MIN_SILENCE, _FIRST_SILENCE = 1.0, 3.0  # seconds where no timeout is given: least, and at first
_STARTING_TIMEOUT = 20.0  # seconds: imports and first calls may hold a worker up while it starts
_MAX_WORDS = 64  # bytes of a frame that says next to nothing


class LinkState(enum.Enum):
    """Where a connection is in its life."""

    CONNECTING = "connecting"
    AGREEING = "agreeing"
    UP = "up"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class MessageTransfer:
    """One message in flight: done once its tensor may be used again."""

    connection: Connection
    view: memoryview
    sends: bool
    done: bool = False

    @property
    def is_done(self) -> bool:
        """Also true for what was sent to a neighbour that said goodbye: it lacks nothing.

        It may do so as soon as it has our message, before our writer knows that it has sent it.
        """
        return self.done or (self.sends and self.connection.finished_at is not None)


@dataclass(eq=False)
class Connection:
    """This worker's end of a connection to a neighbour; the transport's lock guards it."""

    peer: int
    stream: FrameStream
    lock: threading.RLock
    changed: threading.Condition
    """On that lock: notified whenever something is different."""
    limits: Mapping[Kind, int]
    """The longest frames that make sense: a longer one ends its connection."""
    on_frame: Callable[[Connection, Kind, int, bytearray], None]
    """Called by the reader for what is not part of an exchange."""
    on_end: Callable[[Connection, str], None]
    """Called by either thread when the connection must end."""
    peer_has_state: bool = False
    """Whether the neighbour trained when the connection was made, so that it can give a state."""
    state: LinkState = LinkState.CONNECTING
    since: float = field(default_factory=time.monotonic)
    """When it came into this state."""
    first_iteration: int = 0
    """The first iteration whose meetings happen here: before UP what this end said, then the later
    of what both said."""
    their_first: int = 0
    """What the neighbour said."""
    heard_version: int = 0
    """The version that others told of while this end did not know yet that the link was up."""
    end_reason: str | None = None
    """Why it ended, as the end of a sentence about the neighbour."""
    finished_at: int | None = None
    """The iteration at which the neighbour said that it had finished."""
    is_asked: bool = False
    """Whether this worker asked for a state here."""
    is_giving: bool = False
    """Whether that state is arriving."""
    given_state: bytearray | None = None
    gaps: Durations = field(default_factory=Durations)
    """Between two signs of life of the neighbour: the longest between two looks each."""
    reader_waits: bool = False
    """Whether bytes wait here until this worker posts their receive: silence then means nothing."""

    def __post_init__(self) -> None:
        self._work = threading.Condition(self.lock)
        self._untold = Update()
        self._queue: deque[tuple[Kind, int, Sequence[Buffer], MessageTransfer | None]] = deque()
        self._posted: dict[int, deque[MessageTransfer]] = defaultdict(deque)
        self._early: dict[int, deque[bytearray]] = defaultdict(deque)
        self._early_bytes = self._num_early = 0

    def start(self) -> None:
        """Begin to read and write."""
        name = f"matcha-link-{self.peer}"
        self._reader = threading.Thread(target=self._read, name=name, daemon=True)
        self._reader.start()
        threading.Thread(target=self._write, name=name, daemon=True).start()

    def join_reader(self) -> None:
        """After the end: wait until nothing writes into posted memory any more."""
        self._reader.join(timeout=10.0)

    # -- for the transport, which holds the lock --------------------------------------------------

    @property
    def is_up(self) -> bool:
        """Whether meetings happen here."""
        return self.state is LinkState.UP

    def enter(self, state: LinkState) -> None:
        """Go on to another state."""
        self.state, self.since = state, time.monotonic()

    def end(self, reason: str) -> None:
        """Nothing is sent or received here from now on."""
        self.enter(LinkState.ENDED)
        self.end_reason = reason
        self._work.notify_all()
        self.stream.shut()

    def send(
        self,
        kind: Kind,
        tag: int = 0,
        contents: Sequence[Buffer] = (),
        transfer: MessageTransfer | None = None,
    ) -> None:
        """Let the writer send a frame; contents stay untouched until the transfer is done."""
        if self.state is not LinkState.ENDED:
            self._queue.append((kind, tag, contents, transfer))
            self._work.notify()

    def tell(self, update: Update) -> None:
        """Let the writer send an update, in one frame with all others that wait for their turn."""
        if update:
            if not self._untold:
                self.send(Kind.UPDATE)
            self._untold |= update

    def forget_known(self, update: Update) -> None:
        """The neighbour told this itself: it need not be told."""
        if self._untold:
            self._untold = self._untold.without(update)

    def find_fault(
        self, patience: float | None, delay: float, revoked: Collection[str], *, running: bool
    ) -> str | None:
        """Why it must end, if it must; `delay` is how long this worker has not looked in time."""
        stream = self.stream
        if stream.longest_gap:
            self.gaps.note(stream.longest_gap)
            stream.longest_gap = 0.0
        now, most = time.monotonic(), patience or self.gaps.deadline(_MIN_SILENCE, _FIRST_SILENCE)
        most = most if running else max(most, _STARTING_TIMEOUT)
        quiet = now - stream.last_heard
        if quiet > most + delay and not self.reader_waits:
            return f"gave no sign of life for {quiet:.1f} s"
        if self.state is LinkState.AGREEING and now - self.since > most:
            return "did not say from which iteration on it takes part"
        return "showed a certificate that is now revoked" if stream.fingerprint in revoked else None

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits to be sent, or ever will be."""
        return not self._queue or self.state is LinkState.ENDED

    def will_send(self, kind: Kind, tag: int) -> bool:
        """Whether such a frame waits to be sent already."""
        return any(queued[:2] == (kind, tag) for queued in self._queue)

    def send_data(self, tag: int, tensor: torch.Tensor) -> MessageTransfer:
        """Send a message."""
        transfer = MessageTransfer(self, _bytes(tensor), sends=True)
        self.send(Kind.DATA, tag, [transfer.view], transfer)
        return transfer

    def receive(self, tag: int, tensor: torch.Tensor) -> MessageTransfer:
        """Post a receive."""
        transfer = MessageTransfer(self, _bytes(tensor), sends=False)
        early = self._early.get(tag)
        if early:
            content = early.popleft()
            self._early_bytes -= len(content)
            self._num_early -= 1
            try:
                self._deliver(transfer, content)
            except ClosedError as error:
                self.on_end(self, str(error))
        else:
            self._posted[tag].append(transfer)
            if self.reader_waits:
                self.changed.notify_all()
        return transfer

    # -- the two threads --------------------------------------------------------------------------

    def _write(self) -> None:
        try:
            while True:
                with self.lock:
                    while not self._queue and self.state is not LinkState.ENDED:
                        self._work.wait()
                    if self.state is LinkState.ENDED:
                        return
                    kind, tag, contents, transfer = self._queue[0]
                    if kind is Kind.UPDATE:
                        contents, self._untold = [self._untold.encode()], Update()
                self.stream.send(kind, tag, contents)
                with self.lock:
                    self._queue.popleft()
                    if transfer is not None:
                        transfer.done = True
                    if transfer is not None or not self._queue:
                        self.changed.notify_all()
        except ClosedError as error:
            # The other end may have gone after a last frame, which is still to be read.
            self._reader.join(timeout=1.0)
            self.on_end(self, str(error))
        except Exception as error:
            _log.exception("the writer to worker %d failed", self.peer)
            self.on_end(self, f"could not be written to ({error!r})")
        finally:
            self.stream.leave()

    def _read(self) -> None:
        try:
            while True:
                kind, tag, size = self.stream.receive_header()
                if kind is Kind.DATA:
                    self._read_data(tag, size)
                    continue
                if size > self.limits.get(kind, _MAX_WORDS):
                    raise ClosedError(f"announced {size} bytes of {kind.name}")
                if kind is Kind.STATE:
                    if not self.is_asked:
                        raise ClosedError("sent a state for which this worker did not ask")
                    self.is_giving = True
                content = self.stream.receive(size)
                if kind is not Kind.HEARTBEAT:
                    self.on_frame(self, kind, tag, content)
        except ClosedError as error:
            has_finished = self.finished_at is not None
            self.on_end(
                self, f"finished at iteration {self.finished_at}" if has_finished else str(error)
            )
        except Exception as error:  # a neighbour's fault ends its connection, not this worker
            _log.warning("worker %d sent something malformed: %s", self.peer, error)
            self.on_end(self, f"sent something malformed ({error})")
        finally:
            self.stream.leave()

    def _read_data(self, tag: int, size: int) -> None:
        if tag > MAX_TAG:
            raise ClosedError(f"sent a message with tag {tag}")
        transfer = self._posted_transfer(tag, size)
        if transfer is not None:
            _check_size(transfer, size)
            self.stream.receive_into(transfer.view)
            with self.lock:
                transfer.done = True
                self.changed.notify_all()
            return
        content = self.stream.receive(size)
        with self.lock:
            if self._posted.get(tag):
                return self._deliver(self._posted[tag].popleft(), content)
            self._early[tag].append(content)
            self._early_bytes += size
            self._num_early += 1
            if self._early_bytes > _MAX_EARLY_BYTES or self._num_early > _MAX_EARLY:
                raise ClosedError("sent far more than this worker asked for")

    def _posted_transfer(self, tag: int, size: int) -> MessageTransfer | None:
        """The transfer of a message; None for a small one whose receive is not posted yet."""
        with self.lock:
            if not self.is_up:
                raise ClosedError(self.end_reason or "sent a message before the link was up")
            while not self._posted.get(tag):
                if size <= _SMALL:
                    return None
                if self.end_reason is not None:
                    raise ClosedError(self.end_reason)
                self.reader_waits = True
                self.changed.wait()
            self.reader_waits = False
            self.stream.last_heard = time.monotonic()
            return self._posted[tag].popleft()

    def _deliver(self, transfer: MessageTransfer, content: bytearray) -> None:
        _check_size(transfer, len(content))
        transfer.view[:] = content
        transfer.done = True
        self.changed.notify_all()


class Transfers(Pending):
    """The messages of one post: each on its way, or why its peer cannot be reached."""

    def __init__(
        self,
        transfers: list[tuple[int, MessageTransfer | str]],
        anyone_is_away: Callable[[], bool],
        lost_error: Callable[[int, str, float], PeerLostError],
    ) -> None:
        self._transfers = transfers
        self._anyone_is_away, self._lost_error = anyone_is_away, lost_error

    def has_come(self) -> bool:
        """Whether `wait` would return at once; of a connection that has ended it tells."""
        found = (each for _, each in self._transfers if not isinstance(each, str))
        return all(each.done or each.connection.state is LinkState.ENDED for each in found)

    def wait(self, timeout: float) -> None:
        """Wait for all of them; raises for a neighbour that was lost."""
        patience = min(2.0, 0.2 * timeout)  # the rest is for finding the cause
        self._end = time.monotonic() + timeout - patience
        while self._transfers:
            peer, transfer = self._transfers[0]
            if isinstance(transfer, str):
                raise self._lost_error(peer, transfer, patience)
            if problem := self._wait_for(transfer, timeout, patience):
                transfer.connection.join_reader()
                raise self._lost_error(peer, problem, patience)
            self._transfers.pop(0)

    def _wait_for(self, transfer: MessageTransfer, timeout: float, patience: float) -> str:
        """What the peer did instead of its part of a transfer; empty once that is done."""
        connection = transfer.connection
        with connection.lock:
            while not transfer.is_done:
                if connection.end_reason is not None:
                    return connection.end_reason
                if (now := time.monotonic()) <= self._end:
                    connection.changed.wait(self._end - now)
                elif self._anyone_is_away():
                    self._end = now + timeout - patience
                else:
                    connection.on_end(connection, f"did not answer within {timeout:g} s")
        return ""


def _check_size(transfer: MessageTransfer, size: int) -> None:
    if size != len(transfer.view):
        raise ClosedError(f"sent {size} bytes where {len(transfer.view)} were expected")


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().view(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
