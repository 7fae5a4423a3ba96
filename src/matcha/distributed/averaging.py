"""Averaging: all workers' values as one model, and how far the workers are from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from matcha.distributed.buckets import Bucket
from matcha.distributed.collectives import mean_
from matcha.distributed.transports.transport import Transport

__all__ = ["Averaging"]


class Averaging:
    """The average over workers of a model's buckets and floating-point buffers.

    Its calls are collective, and must not run beside an exchange.
    """

    def __init__(
        self, transport: Transport, model: nn.Module, buckets: Sequence[Bucket], deadline: float
    ) -> None:
        self._transport = transport
        self._model = model
        self._buckets = buckets
        self._deadline = deadline

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model holds the average inside, and its own values again after."""
        tensors = self._tensors()
        own = [tensor.clone() for tensor in tensors]
        mean_(self._transport, tensors, self._deadline)
        try:
            yield
        finally:
            for tensor, value in zip(tensors, own, strict=True):
                tensor.copy_(value)

    def consensus_distance(self) -> float:
        """(1/m) Σ ‖x_i − x̄‖² over the workers' parameters."""
        own = [bucket.data for bucket in self._buckets if not bucket.volatile]
        centre = [tensor.clone() for tensor in own]
        mean_(self._transport, centre, self._deadline)
        squares = sum(
            float((x - c).double().square().sum()) for x, c in zip(own, centre, strict=True)
        )
        total = torch.tensor([squares], dtype=torch.float64)
        mean_(self._transport, [total], self._deadline)
        return float(total)

    def _tensors(self) -> list[torch.Tensor]:
        """The buckets, and floating-point buffers that are in none."""
        inside = {id(slot.tensor) for bucket in self._buckets for slot in bucket.slots}
        buffers = [b for b in self._model.buffers() if id(b) not in inside]
        parts = [torch.view_as_real(b) if b.is_complex() else b for b in buffers]
        return [bucket.data for bucket in self._buckets] + [
            b for b in parts if b.is_floating_point()
        ]
