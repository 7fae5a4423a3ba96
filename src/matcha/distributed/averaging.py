"""Averaging: all workers' values as one model, and how far the workers are from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from matcha.distributed.collectives import broadcast, mean_
from matcha.distributed.exchange.buckets import Bucket
from matcha.distributed.exchange.push_sum import PushSumValues
from matcha.distributed.exchange.shards import local, share
from matcha.distributed.seats import Seat

__all__ = ["Averaging"]


class Averaging:
    """The average over workers of a model's buckets and floating-point buffers.

    Its calls are collective, and must not run beside an exchange.

    Attributes:
        push_sum: where there is one, a worker's values count by its ω: the mean is Σx/Σω, not of z.
    """

    def __init__(
        self, seat: Seat, model: nn.Module, buckets: Sequence[Bucket], deadline: float
    ) -> None:
        self._seat = seat
        self._model = model
        self._buckets = buckets
        self._deadline = deadline
        self.push_sum: PushSumValues | None = None

    def start_equal(self) -> None:
        """Give all workers worker 0's values: parameters, frozen ones too, and buffers."""
        inside = {id(slot.tensor) for bucket in self._buckets for slot in bucket.slots}
        others = [*self._model.parameters(), *self._model.buffers()]
        outside = [local(t.data) for t in others if id(t) not in inside]
        self._pack()
        values = [bucket.data for bucket in self._buckets] + [t for t in outside if t.numel()]
        broadcast(self._seat.transport, values, self._deadline)
        self._unpack()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model holds the average inside, and its own values again after."""
        self._pack()
        tensors = self._tensors()
        own = [tensor.clone() for tensor in tensors]
        if self.push_sum is not None:
            for bucket in self._buckets:
                bucket.data.mul_(self.push_sum.omega)
        mean_(self._seat.transport, tensors, self._deadline)
        self._unpack()
        try:
            yield
        finally:
            for tensor, value in zip(tensors, own, strict=True):
                tensor.copy_(value)
            self._unpack()

    def consensus_distance(self) -> float:
        """(1/m) Σ ‖x_i − x̄‖² over the workers' parameters; of push-sum's z, around Σx/Σω."""
        share = 1.0 if self.push_sum is None else self.push_sum.omega
        self._pack()
        total = 0.0
        for bucket in self._buckets:
            if not bucket.volatile:
                centre = bucket.data * share
                mean_(self._seat.transport, [centre], self._deadline)
                squares = (bucket.data - centre).double().square_()
                total += self._weighted(bucket, squares)
        return self._seat.sum(total, self._deadline)

    def _weighted(self, bucket: Bucket, squares: torch.Tensor) -> float:
        """The sum, with what several processes of a worker hold counted once."""
        shares = {share(slot.tensor, self._seat.num_parts) for slot in bucket.slots}
        if len(shares) == 1:
            return shares.pop() * float(squares.sum())
        total = 0.0
        for slot in bucket.slots:
            size = slot.shape.numel() * slot.dtype.itemsize // bucket.data.element_size()
            part = squares[slot.offset : slot.offset + size]
            total += share(slot.tensor, self._seat.num_parts) * float(part.sum())
        return total

    def _pack(self) -> None:
        for bucket in self._buckets:
            bucket.pack()

    def _unpack(self) -> None:
        for bucket in self._buckets:
            bucket.unpack()

    def _tensors(self) -> list[torch.Tensor]:
        """The buckets, and floating-point buffers that are in none."""
        inside = {id(slot.tensor) for bucket in self._buckets for slot in bucket.slots}
        buffers = [local(b) for b in self._model.buffers() if id(b) not in inside]
        parts = [torch.view_as_real(b) if b.is_complex() else b for b in buffers]
        floating = [b for b in parts if b.is_floating_point()]
        return [bucket.data for bucket in self._buckets] + floating
