"""Exchanges on a thread of their own: in step with the gradient, or when both ends have time.

Where workers meet when both have time, a worker marks the neighbours that it wants to meet and goes
on; a thread does the rest. On each link the higher rank says READY, and the lower one CALLs when it
wants to meet as well: then both hold the meeting.

A worker holds one meeting at a time, and still no two can block each other: a worker that has
called waits only for a higher rank, and that one is free, or was called (then both ends of its
meeting are there and it ends), or has called a still higher rank. So every chain of waiting ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias

import torch

from matcha.distributed.exchange.buckets import Bucket, copy_values
from matcha.distributed.exchange.exchange import Exchange, Stopwatch
from matcha.distributed.exchange.meeting import Meeting, PlanCursor
from matcha.distributed.transports.base import Message, Pending, Tag, Transport
from matcha.distributed.transports.collectives import barrier
from matcha.errors import ExchangeError
from matcha.rounds import Round

Hold: TypeAlias = Callable[[int, float, int], None]
"""Holds a meeting: peer, weight, and how many meetings the two have held."""

_RESTS = 5e-3, 2e-2  # most seconds between two looks: while a neighbour is wanted, and else
_FIRST_PROBE = 1.0  # seconds; each further one comes when twice as much has passed


class Word(IntEnum):
    """What one end of a link says to the other."""

    READY = 1
    CALL = 2
    BYE = 3


@dataclass(slots=True, eq=False)
class _LinkEnd:
    """What this worker knows of one link."""

    peer: int
    arriving: torch.Tensor
    pending: Pending
    leaving: tuple[Pending, torch.Tensor] | None = None
    wanted: float | None = None
    """The weight at which this worker wants a meeting; None when it does not."""
    offered: float | None = None
    """The weight of the READY that this end has said, while the other may call."""
    asked: tuple[int, float] | None = None
    """Period and weight of the other end's last READY."""
    number: int = 0
    """How many meetings the two have held."""
    said_bye: bool = False
    heard_bye: bool = False
    wanted_since: float = field(default_factory=time.monotonic)
    probe_at: float = 0.0


class Rendezvous:
    """This worker's meetings with its neighbours, whenever both ends have time.

    `hold` runs on the thread. The timeout is for a meeting that has begun, and for goodbyes; before
    it has begun a neighbour may take as long as it likes. `held` counts meetings.
    """

    def __init__(
        self, transport: Transport, neighbors: Iterable[int], hold: Hold, timeout: float
    ) -> None:
        self.held = 0
        self._transport, self._hold, self._timeout = transport, hold, timeout
        self._changed = threading.Condition()
        self._calling = self._meeting = False
        self._paused = self._leaves = self._stops = False
        self._period = 0
        self._error: BaseException | None = None
        self._lines = [_LinkEnd(peer, *self._listen(peer)) for peer in sorted(neighbors)]
        name = f"matcha-meetings-{transport.rank}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # -- for the script's thread ------------------------------------------------------------------

    def want(self, weights: Mapping[int, float]) -> None:
        """Meet these workers as soon as they want to; wishes from before stay."""
        with self._changed:
            for line in self._lines:
                if line.peer in weights and line.wanted is None and not line.heard_bye:
                    line.wanted = weights[line.peer]
                    line.wanted_since = time.monotonic()
                    line.probe_at = line.wanted_since + _FIRST_PROBE
            self._changed.notify_all()

    @property
    def is_open(self) -> bool:
        """Whether a meeting is wanted or under way."""
        with self._changed:
            return self._meeting or any(line.wanted is not None for line in self._lines)

    def check(self) -> None:
        """Raise what went wrong on the thread."""
        if self._error is not None:
            raise self._error

    def pause(self) -> None:
        """Make no more calls, and let a meeting that this worker called end."""
        with self._changed:
            self._paused = True
            self._wait(lambda: not self._calling, "a meeting to end")

    def reset(self) -> None:
        """Once all workers have paused: let the last meeting end, drop all wishes, and go on.

        A worker that has paused has no unanswered call. So once all have, no worker is called any
        more, and a meeting under way has both its ends there. What was said before belongs to an
        earlier period from now on, at every worker alike.
        """
        with self._changed:
            self._wait(lambda: not self._meeting, "a meeting to end")
            self._period += 1
            self._paused = False
            for line in self._lines:
                line.wanted = line.offered = None

    def leave(self) -> None:
        """Say BYE on all links, and hold what was agreed before; may be called twice."""
        self._leaves = True
        self._notify()
        self._thread.join(self._timeout)
        self.check()
        if self._thread.is_alive():
            silent = (self._transport.name(li.peer) for li in self._lines if not li.heard_bye)
            raise ExchangeError(f"no goodbye from {', '.join(silent)} in {self._timeout:g} s.")

    def stop(self) -> None:
        """End the thread without saying BYE."""
        self._stops = True
        self._notify()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        ended = self._changed.wait_for(
            lambda: done() or self._error is not None or not self._thread.is_alive(), self._timeout
        )
        self.check()
        if not ended:
            raise ExchangeError(
                f"{self._transport.name(self._transport.rank)} waited {self._timeout:g} s for "
                f"{what}."
            )

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._transport.failed = True
            self._error = error
        self._notify()

    def _work(self) -> None:
        moved_at = time.monotonic()
        while not self._stops and not all(li.said_bye and li.heard_bye for li in self._lines):
            moved = [self._hear(line) for line in self._lines]
            moved += [self._speak(line) for line in self._lines]
            if any(moved):
                moved_at = time.monotonic()
                continue
            with self._changed:
                wanted = self._leaves or any(line.wanted is not None for line in self._lines)
                waited = time.monotonic() - moved_at
                longest = _RESTS[0 if wanted else 1]
                self._changed.wait(min(longest, max(2e-4, waited / 20)) if wanted else longest)
        for line in self._lines:
            if line.leaving is not None and not self._stops:
                line.leaving[0].wait(self._timeout)

    def _hear(self, line: _LinkEnd) -> bool:
        """Handle what the other end has said, if anything."""
        if line.heard_bye:
            return False
        if not line.pending.has_come():
            self._probe(line)
            return False
        line.pending.wait(self._timeout)
        bits, period, word = line.arriving.tolist()
        if word == Word.BYE:
            with self._changed:
                line.heard_bye, line.wanted = True, None
                self._changed.notify_all()
            return True
        line.arriving, line.pending = self._listen(line.peer)
        if word == Word.READY:
            line.asked = period, _weight(bits)
            return True
        with self._changed:
            offered, line.offered, line.wanted = line.offered, None, None
            self._meeting = True
        assert offered is not None, "called without having said READY"
        self._meet(line, (offered + _weight(bits)) / 2)
        return True

    def _speak(self, line: _LinkEnd) -> bool:
        """Say what there is to say on a link."""
        if line.said_bye:
            return False
        if self._leaves or line.heard_bye:
            line.said_bye = True
            self._say(line, Word.BYE, 0.0, self._period)
            return True
        with self._changed:
            weight, period = line.wanted, self._period
            if weight is None:
                return False
            if line.peer < self._transport.rank:
                if line.offered is not None:
                    return False
                line.offered = weight
            else:
                if self._paused or line.asked is None or line.asked[0] != period:
                    return False
                theirs, line.asked, line.wanted = line.asked[1], None, None
                self._calling = self._meeting = True
        if line.peer < self._transport.rank:
            self._say(line, Word.READY, weight, period)
            return True
        self._say(line, Word.CALL, weight, period)
        self._meet(line, (weight + theirs) / 2)
        return True

    def _meet(self, line: _LinkEnd, weight: float) -> None:
        self._hold(line.peer, weight, line.number)
        with self._changed:
            line.number += 1
            self.held += 1
            self._calling = self._meeting = False
            self._changed.notify_all()

    # -- words ------------------------------------------------------------------------------------

    def _listen(self, peer: int) -> tuple[torch.Tensor, Pending]:
        arriving = torch.zeros(3, dtype=torch.int64)
        return arriving, self._transport.post(
            [Message(peer=peer, tag=Tag.RENDEZVOUS, incoming=arriving)]
        )

    def _say(self, line: _LinkEnd, word: Word, weight: float, period: int) -> None:
        if line.leaving is not None:
            line.leaving[0].wait(self._timeout)
        bits = int(torch.tensor(weight, dtype=torch.float64).view(torch.int64))
        said = torch.tensor([bits, period, word], dtype=torch.int64)
        message = Message(peer=line.peer, tag=Tag.RENDEZVOUS, outgoing=said)
        line.leaving = self._transport.post([message]), said

    def _probe(self, line: _LinkEnd) -> None:
        """Check ever more rarely that a wanted neighbour is still there; it may take long."""
        now = time.monotonic()
        if now < line.probe_at or (line.wanted is None and not self._leaves):
            return
        self._transport.probe(line.peer)
        line.probe_at = now + max(_FIRST_PROBE, now - line.wanted_since)


def _weight(bits: int) -> float:
    return float(torch.tensor(bits, dtype=torch.int64).view(torch.float64))


class Overlap:
    """The exchange of a round, while the gradient is computed; it works on a copy of the buckets.

    x ← Wx − ηg, the paper's footnote to eq. 2: the exchange reads the parameters at which the
    gradient is taken, and both changes are added: nothing is stale.

    Parameters do not change between two steps, so the copy is made, mixed and turned into Wx − x on
    the thread. Volatile buckets (BatchNorm's statistics) do change; they are copied before.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.mixed = [bucket.data.clone() for bucket in buckets]
        self._buckets = buckets
        self._before = [b.data.clone() if b.volatile else b.data for b in buckets]
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="matcha-exchange")
        self._task: Future[None] | None = None
        on_gpu = any(bucket.data.is_cuda for bucket in buckets)
        self._stream = torch.cuda.Stream() if on_gpu else None  # type: ignore[no-untyped-call]

    def start(self, run: Callable[[], None]) -> None:
        """Begin an exchange, unless one is under way or waits to be merged."""
        if self._task is not None:
            return
        for bucket, before in zip(self._buckets, self._before, strict=True):
            bucket.pack()
            if bucket.volatile:
                before.copy_(bucket.data)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        self._task = self._thread.submit(self._work, run)

    def _work(self, run: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            copy_values(self.mixed, self._before)
            run()
            for mixed, before in zip(self.mixed, self._before, strict=True):
                mixed.sub_(before)

    def finish(self) -> None:
        """Wait for the exchange under way, before the optimizer steps; its error is raised here."""
        if self._task is not None:
            self._task.result()
            if self._stream is not None:
                torch.cuda.current_stream().wait_stream(self._stream)

    def merge(self) -> None:
        """Add the finished exchange's Wx − x to the buckets."""
        self.finish()
        for bucket, change in zip(self._buckets, self.mixed, strict=True):
            bucket.pack()
            bucket.data.add_(change)
            bucket.unpack()
        self._task = None

    def pending(self) -> list[torch.Tensor]:
        """Return the finished exchange's Wx − x, if one waits to be merged; empty otherwise.

        A checkpoint needs it where the wire or a bound remembers exchanges: to repeat this one
        would count it twice.
        """
        return [] if self._task is None else self.mixed

    def restore(self, pending: Sequence[torch.Tensor]) -> None:
        """Let an exchange from a checkpoint wait to be merged."""
        copy_values(self.mixed, pending)
        self._task = Future()
        self._task.set_result(None)

    def discard(self) -> None:
        """Wait for the exchange under way and forget it, as if it had not been started."""
        self.finish()
        self._task = None

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()


class Asynchrony:
    """Meetings that happen when both ends have time, and move parameters at the next step.

    A worker holds y = x + moves: x are the parameters, at which gradients are computed and which
    change only when a step ends; moves are what meetings since then have added. A meeting takes y
    at both ends and adds ±w(y_j − y_i) to the moves: opposite amounts, so the sum over workers is
    kept, and a gradient is stale by no more than the meetings of its own iteration (AD-PSGD on a
    plan).

    It costs four copies of the parameters.
    """

    def __init__(
        self, buckets: Sequence[Bucket], transport: Transport, neighbors: Sequence[int]
    ) -> None:
        self._buckets, self._transport, self._neighbors = buckets, transport, neighbors
        self._x = [bucket.data.clone() for bucket in buckets]
        self._moves = [torch.zeros_like(bucket.data) for bucket in buckets]
        self._taken = [bucket.data.clone() for bucket in buckets]
        self.mixed = [bucket.data.clone() for bucket in buckets]
        """What the exchange works on: y as a meeting takes it."""
        self._lock = threading.Lock()
        self._has_moves = False
        self._is_fresh = False
        self._wanted_at: int | None = None
        self._on_gpu = any(bucket.data.is_cuda for bucket in buckets)

    def open(self, exchange: Exchange, stopwatch: Stopwatch, timeout: float) -> None:
        """Start to hold meetings, by an exchange of whole values over `mixed`."""
        self._exchange, self._stopwatch, self._timeout = exchange, stopwatch, timeout
        self._transport.asynchronous = True
        self.rendezvous = Rendezvous(self._transport, self._neighbors, self._hold, timeout)

    # -- the script's thread ----------------------------------------------------------------------

    def want(self, cursor: PlanCursor) -> None:
        """Want the partners of the current round; again for the same iteration does nothing."""
        if cursor.iteration == self._wanted_at:
            return
        self._wanted_at = cursor.iteration
        if cursor.met:
            if not self._is_fresh:
                with self._lock:
                    self._publish()
            self.rendezvous.want({meeting.peer: meeting.weight for meeting in cursor.met})

    def merge(self) -> bool:
        """After a step: add to the parameters what meetings have moved; whether any has."""
        self.rendezvous.check()
        with self._lock:
            moved, self._has_moves = self._has_moves, False
            if moved:
                for bucket, move in zip(self._buckets, self._moves, strict=True):
                    bucket.data.add_(move)
                    move.zero_()
            self._is_fresh = False
            if self.rendezvous.is_open:
                self._publish()
        return moved

    def settle(self) -> None:
        """End all meetings at both ends alike, and add what they moved. A collective call.

        Wishes for meetings that did not take place are dropped.
        """
        self.rendezvous.pause()
        barrier(self._transport, self._timeout)
        self.rendezvous.reset()
        self.merge()
        self._wanted_at = None

    def close(self) -> None:
        """End the thread, and add what the last meetings moved."""
        self.rendezvous.stop()
        self._transport.asynchronous = False
        if not self._transport.failed:
            self.merge()

    def _publish(self) -> None:
        copy_values(self._x, (bucket.data for bucket in self._buckets))
        self._is_fresh = True
        self._synchronize()

    # -- the meetings' thread ---------------------------------------------------------------------

    def _hold(self, peer: int, weight: float, number: int) -> None:
        with self._lock:
            for mixed, x, move in zip(self.mixed, self._x, self._moves, strict=True):
                torch.add(x, move, out=mixed)
            copy_values(self._taken, self.mixed)
            self._synchronize()
        link = (min(peer, self._transport.rank), max(peer, self._transport.rank))
        pair = Round(matchings=((link,),), indices=(0,), mixing="pairwise", weight=weight)
        with self._stopwatch.exchanging(self._exchange, number):
            self._exchange.run(pair, (Meeting(0, peer, weight),), number)
        with self._lock:
            for mixed, taken, move in zip(self.mixed, self._taken, self._moves, strict=True):
                move.add_(mixed.sub_(taken))
            self._has_moves = True
            self._synchronize()

    def _synchronize(self) -> None:
        """Two threads have two streams: each must see what the other wrote under the lock."""
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()
