"""Exchanges on a thread of their own: in step with the gradient, or when both ends have time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext

import torch

from matcha.distributed.exchange.async_rendezvous import Rendezvous
from matcha.distributed.exchange.buckets import Bucket
from matcha.distributed.exchange.exchange import Exchange, Stopwatch
from matcha.distributed.exchange.meeting import Meeting, PlanCursor
from matcha.distributed.transports.base import Transport
from matcha.distributed.transports.collectives import barrier
from matcha.rounds import Round

__all__ = ["Asynchrony", "Overlap"]


class Overlap:
    """The exchange of a round, while the gradient is computed; it works on a copy of the buckets.

    x ← Wx − ηg, the paper's footnote to eq. 2: the exchange reads the parameters at which the
    gradient is taken, and both changes are added. Nothing is stale, so nothing about convergence
    changes.

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
            for mixed, before in zip(self.mixed, self._before, strict=True):
                mixed.copy_(before)
            run()
            for mixed, before in zip(self.mixed, self._before, strict=True):
                mixed.sub_(before)

    def finish(self) -> None:
        """Wait for the exchange under way, if any; its error is raised here.

        Must come before the optimizer changes the parameters.
        """
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
        for mixed, change in zip(self.mixed, pending, strict=True):
            mixed.copy_(change)
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

    Args:
        buckets: the parameters.
        transport: several threads may use it.
        neighbors: of this worker.

    Attributes:
        mixed: what the exchange works on: y as a meeting takes it.
        rendezvous: who is met, and when; after `open`.
    """

    def __init__(
        self, buckets: Sequence[Bucket], transport: Transport, neighbors: Sequence[int]
    ) -> None:
        self._buckets, self._transport, self._neighbors = buckets, transport, neighbors
        self._x = [bucket.data.clone() for bucket in buckets]
        self._moves = [torch.zeros_like(bucket.data) for bucket in buckets]
        self._taken = [bucket.data.clone() for bucket in buckets]
        self.mixed = [bucket.data.clone() for bucket in buckets]
        self._lock = threading.Lock()
        self._has_moves = False
        self._is_fresh = False
        self._wanted_at: int | None = None
        self._on_gpu = any(bucket.data.is_cuda for bucket in buckets)

    def open(self, exchange: Exchange, stopwatch: Stopwatch, timeout: float) -> None:
        """Start to hold meetings.

        Args:
            exchange: of whole values, over `mixed`.
            stopwatch: for spans.
            timeout: seconds for a meeting that has begun.
        """
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

    def leave(self) -> None:
        """Say goodbye to the neighbours, so that no meeting breaks off."""
        self.rendezvous.leave()

    def close(self) -> None:
        """End the thread, and add what the last meetings moved."""
        self.rendezvous.stop()
        self._transport.asynchronous = False
        if not self._transport.failed:
            self.merge()

    def _publish(self) -> None:
        for x, bucket in zip(self._x, self._buckets, strict=True):
            x.copy_(bucket.data)
        self._is_fresh = True
        self._synchronize()

    # -- the meetings' thread ---------------------------------------------------------------------

    def _hold(self, peer: int, weight: float, number: int) -> None:
        with self._lock:
            for mixed, taken, x, move in zip(
                self.mixed, self._taken, self._x, self._moves, strict=True
            ):
                torch.add(x, move, out=mixed)
                taken.copy_(mixed)
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
