"""Averaging: all workers' values as one model, and how far the workers are from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional

from matcha.distributed.exchange.buckets import Bucket, copy_values, local, part_weight
from matcha.distributed.launch.placement import Placement
from matcha.distributed.transports.collectives import broadcast, mean_


class PushSumValues:
    """One worker's x and ω, for messages that go one way and are not balanced by others.

    The parameters are z = x/ω, at which gradients are taken; x, which starts from them, and ω,
    from 1, are kept beside them and are what is exchanged. `matcha.rounds.PushSum` defines it.
    """

    def __init__(self, values: Sequence[torch.Tensor]) -> None:
        self._values = list(values)
        self._x = [value.clone() for value in values]
        self._omega = torch.ones(1, dtype=torch.float64)
        self.mixed = [*self._x, self._omega]
        """What messages carry."""

    @property
    def omega(self) -> float:
        """This worker's weight; all workers' sum to their number."""
        return float(self._omega)

    def state(self) -> Mapping[str, torch.Tensor]:
        """What later rounds depend on: x and ω, without which z cannot go on."""
        return {"omega": self._omega, **{f"x{k}": x for k, x in enumerate(self._x)}}

    def reset(self) -> None:
        """Start again from the current parameters."""
        self._omega.fill_(1.0)
        copy_values(self._x, self._values)

    def __enter__(self) -> None:
        """Before an exchange x takes the steps that z took since the last one."""
        for x, z in zip(self._x, self._values, strict=True):
            x.add_(z - x / self.omega)

    def __exit__(self, *_: object) -> None:
        """After it z is what the exchange made of x and ω."""
        for x, z in zip(self._x, self._values, strict=True):
            torch.div(x, self.omega, out=z)


class Averaging:
    """The average over workers of a model's parameters and buffers.

    Its calls are collective, and must not run beside an exchange.
    """

    def __init__(
        self,
        placement: Placement,
        model: nn.Module,
        buckets: Sequence[Bucket],
        timeout: Callable[[], float],
    ) -> None:
        self._placement, self._model, self._buckets = placement, model, buckets
        self._timeout = timeout
        self.push_sum: PushSumValues | None = None
        """If any, its ω weighs a worker's values: the mean is Σx/Σω, not that of z."""
        self.is_open = False
        """Whether the model holds the average now."""

    def start_equal(self) -> None:
        """Give all workers worker 0's values: parameters, frozen ones too, and buffers."""
        values = self.values() + self._outside()
        broadcast(self._placement.transport, values, self._timeout())
        self._unpack()

    def _outside(self) -> list[torch.Tensor]:
        """This process's part of the parameters and buffers that are in no bucket."""
        inside = {id(slot.tensor) for bucket in self._buckets for slot in bucket.slots}
        tensors = [*self._model.parameters(), *self._model.buffers()]
        parts = [local(t.data) for t in tensors if id(t) not in inside]
        return [part for part in parts if part.numel()]

    def values(self) -> list[torch.Tensor]:
        """What is exchanged, by bucket."""
        self._pack()
        return [bucket.data for bucket in self._buckets]

    def take(self, values: Sequence[torch.Tensor]) -> None:
        """Let the model have these values in place of its own."""
        copy_values((bucket.data for bucket in self._buckets), values)
        self._unpack()

    @contextmanager
    def holding(self, others: Sequence[torch.Tensor]) -> Iterator[None]:
        """The model holds other values inside, by bucket, and its own again after."""
        own = [value.clone() for value in self.values()]
        self.take(others)
        try:
            yield
        finally:
            self.take(own)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model holds the average inside, and its own values again after.

        Everything that differs between workers is averaged: what is exchanged, and parameters and
        buffers that training changes otherwise (a teacher's, BatchNorm's). Whole numbers stay each
        worker's own. Variances of BatchNorm are pooled: within workers, and of workers' means.
        """
        with torch.no_grad():
            tensors = self.values() + self._differing()
            own = [tensor.clone() for tensor in tensors]
            self._add_variance_between()
            self._pack()
            for bucket in self._buckets:
                bucket.data.mul_(self._share)
            mean_(self._placement.transport, tensors, self._timeout())
            self._unpack()
        was_open, self.is_open = self.is_open, True
        try:
            yield
        finally:
            self.is_open = was_open
            with torch.no_grad():
                copy_values(tensors, own)
                self._unpack()

    @property
    def _share(self) -> float | torch.Tensor:
        """The weight of this worker's buckets."""
        return 1.0 if self.push_sum is None else self.push_sum.omega

    def consensus_distance(self) -> float:
        """(1/m) Σ ‖x_i − x̄‖² over the workers' parameters; of push-sum's z, around Σx/Σω."""
        self._pack()
        total = 0.0
        for bucket in (bucket for bucket in self._buckets if not bucket.volatile):
            centre = bucket.data * self._share
            mean_(self._placement.transport, [centre], self._timeout())
            squares = (bucket.data - centre).double().square_()
            # What several processes of a worker hold counts once.
            shares = [part_weight(slot.tensor, self._placement.num_parts) for slot in bucket.slots]
            if len(set(shares)) == 1:
                total += shares[0] * float(squares.sum())
                continue
            total += sum(
                share * float(bucket.part(slot, squares).sum())
                for slot, share in zip(bucket.slots, shares, strict=True)
            )
        return self._placement.sum(total, self._timeout())

    def _pack(self) -> None:
        for bucket in self._buckets:
            bucket.pack()

    def _unpack(self) -> None:
        for bucket in self._buckets:
            bucket.unpack()

    def _differing(self) -> list[torch.Tensor]:
        """Return the real and complex tensors outside the buckets that differ between workers."""
        parts = [torch.view_as_real(p) if p.is_complex() else p for p in self._outside()]
        outside = [part for part in parts if part.is_floating_point()]
        if not outside:
            return []
        transport = self._placement.transport
        own = torch.tensor([_fingerprint(part) for part in outside])
        first = own.clone()
        broadcast(transport, [first], self._timeout())
        unlike = (own != first).long()
        mean_(transport, [unlike], self._timeout())  # of whole numbers the sum
        pooled = {t.data_ptr() for pair in self._statistics() for t in pair}
        flags = zip(outside, unlike.tolist(), strict=True)
        return [part for part, count in flags if count or part.data_ptr() in pooled]

    def _statistics(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield running means and variances, of BatchNorm and of modules that name them alike."""
        for module in self._model.modules():
            mean, variance = (getattr(module, f"running_{name}", None) for name in ("mean", "var"))
            if isinstance(mean, torch.Tensor) and isinstance(variance, torch.Tensor):
                yield local(mean), local(variance)

    def _add_variance_between(self) -> None:
        """Add to each running variance the squared distance of its mean from the average mean."""
        pairs = list(self._statistics())
        if not pairs:
            return
        inside = {s.tensor.data_ptr() for b in self._buckets for s in b.slots}
        shares = [self._share if mean.data_ptr() in inside else 1.0 for mean, _ in pairs]
        centres = [mean * share for (mean, _), share in zip(pairs, shares, strict=True)]
        mean_(self._placement.transport, centres, self._timeout())
        for (mean, variance), centre in zip(pairs, centres, strict=True):
            variance.add_((mean - centre).square())


_CHUNK = 1 << 20
_MULTIPLIER = -7046029254386353131  # splitmix64's, as a signed word


def _fingerprint(tensor: torch.Tensor) -> int:
    """Return a number that differs if tensors differ: the sum of their words, mixed by place."""
    raw = tensor.contiguous().flatten().view(torch.uint8)
    # Words of 8 bytes are viewed only where they are aligned.
    ready = len(raw) % 8 == 0 == raw.storage_offset() % 8
    words = (raw if ready else functional.pad(raw, (0, -len(raw) % 8)).clone()).view(torch.int64)
    total = 0
    for start in range(0, len(words), _CHUNK):
        part = words[start : start + _CHUNK]
        mixed = (part ^ (part >> 32)) * _MULTIPLIER  # a float's low bits are often zeros
        mixed ^= mixed >> 29
        odd = torch.arange(2 * start + 1, 2 * (start + len(part)), 2, device=part.device)
        total += int((mixed * odd).sum())
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)
