"""Overlap: the exchange of a round runs on its own thread while the gradient is computed.

x ← Wx − ηg, the paper's footnote to eq. 2: the exchange reads the parameters at which the gradient
is taken, and both changes are added. Nothing is stale, so nothing about convergence changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext

import torch

from matcha.distributed.exchange.buckets import Bucket

__all__ = ["Overlap"]


class Overlap:
    """One exchange in the background, and one copy of the buckets for it to work on.

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
