"""Asynchronous rendezvous: two workers meet when both have time, and never wait for each other.

A worker marks the neighbours that it wants to meet and goes on; a thread does the rest. On each
link the higher rank says READY, and the lower one CALLs when it wants to meet as well: then both
hold the meeting.

A worker holds one meeting at a time, and still no two can block each other: a worker that has
called waits only for a higher rank, and that one is free, or was called (then both ends of its
meeting are there and it ends), or has called a still higher rank. So every chain of waiting ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias

import torch

from matcha.distributed.transports.base import Message, Pending, Tag, Transport
from matcha.errors import ExchangeError

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
    """This worker's meetings, whenever both ends have time.

    Args:
        transport: several threads may use it.
        neighbors: whom this worker may ever want.
        hold: holds one meeting; on the thread.
        timeout: seconds for a meeting that has begun, and for goodbyes. Before it has begun a
            neighbour may take as long as it likes.

    Attributes:
        held: how many meetings took place.
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

    def wait_for_all(self) -> None:
        """Wait until all wishes are met; only where the neighbours will want this worker too."""
        with self._changed:
            self._wait(lambda: all(line.wanted is None for line in self._lines), "its partners")
            self._wait(lambda: not self._meeting, "a meeting to end")

    def leave(self) -> None:
        """Say BYE on all links, and hold what was agreed before; may be called twice."""
        with self._changed:
            self._leaves = True
            self._changed.notify_all()
        self._thread.join(self._timeout)
        self.check()
        if self._thread.is_alive():
            raise ExchangeError(f"no goodbye from {self._silent()} in {self._timeout:g} s.")

    def stop(self) -> None:
        """End the thread without saying BYE."""
        with self._changed:
            self._stops = True
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

    def _silent(self) -> str:
        names = [self._transport.name(line.peer) for line in self._lines if not line.heard_bye]
        return ", ".join(names)

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._transport.failed = True
            self._error = error
        with self._changed:
            self._changed.notify_all()

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
        else:
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
