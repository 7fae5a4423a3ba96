"""Wiring: the exchange that a plan's wire asks for, over a model's buckets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Protocol

import torch

from matcha.distributed.exchange.buckets import Bucket
from matcha.distributed.exchange.exchange import Exchange, Meeting
from matcha.distributed.exchange.lowrank import LowRankExchange
from matcha.distributed.exchange.modulo import ModuloExchange
from matcha.distributed.transports.base import Transport
from matcha.rounds import Round
from matcha.wires import Float, LowRank, Wire
from matcha.wires.segments import Segment
from matcha.wires.wire import BLOCK

__all__ = ["Exchanger", "alignment", "make_exchange"]

_Coded = LowRankExchange | ModuloExchange


class Exchanger(Protocol):
    """What carries out one worker's part of a round."""

    timeout: float
    finished_at: int

    @property
    def wait_seconds(self) -> float: ...  # noqa: D102
    @property
    def bytes_sent(self) -> int: ...  # noqa: D102
    @property
    def spare_bytes(self) -> int: ...  # noqa: D102
    @property
    def finished(self) -> set[int]: ...  # noqa: D102
    def run(self, round: Round, met: Sequence[Meeting], iteration: int) -> None: ...  # noqa: D102
    def state(self) -> Mapping[str, torch.Tensor]: ...  # noqa: D102
    def forget(self, peer: int) -> None: ...  # noqa: D102


def alignment(wire: Wire) -> int:
    """At multiples of how many values parameters begin in a bucket."""
    return 1 if isinstance(wire, Float) else BLOCK


def make_exchange(
    wire: Wire,
    transport: Transport,
    buckets: Sequence[Bucket],
    values: Sequence[torch.Tensor],
    besides: Sequence[tuple[Bucket, torch.Tensor]],
    bucket_bytes: int,
    timeout: float,
) -> Exchanger:
    """The exchange for a wire.

    Args:
        wire: what messages hold.
        transport: carries them.
        buckets: where the parameters lie.
        values: what is mixed, one tensor laid out like each of the buckets; push-sum's weight last.
        besides: what travels with them, laid out like these buckets.
        bucket_bytes: bounds messages and spare memory.
        timeout: seconds to wait for any one message.
    """
    wire_dtype = torch.bfloat16 if wire == Float(name="bfloat16") else None
    pairs = [*zip(cycle(buckets), values, strict=False), *besides]
    if isinstance(wire, Float):
        coded, others = [], pairs
    else:
        coded = [pair for pair in pairs if _is_coded(pair[0])]
        others = [pair for pair in pairs if not _is_coded(pair[0])]
    whole = None
    if others or not coded:
        parts = [value for _, value in others]
        whole = Exchange(
            transport, parts, bucket_bytes=bucket_bytes, wire_dtype=wire_dtype, timeout=timeout
        )
    if isinstance(wire, Float) or not coded:
        assert whole is not None
        return whole
    chosen, segments = [v for _, v in coded], [_segments(bucket) for bucket, _ in coded]
    packed: _Coded
    if isinstance(wire, LowRank):
        packed = LowRankExchange(transport, chosen, segments, wire, timeout=timeout)
    else:
        packed = ModuloExchange(
            transport, chosen, segments, wire, bucket_bytes=bucket_bytes, timeout=timeout
        )
    return packed if whole is None else _Both(packed, whole)


def _is_coded(bucket: Bucket) -> bool:
    """Statistics, whole numbers and half precision go whole: they are few, or small already."""
    exact = bucket.data.dtype in (torch.float32, torch.float64)
    return exact and bool(bucket.slots) and not bucket.volatile


def _segments(bucket: Bucket) -> list[Segment]:
    places = {}
    for slot in bucket.slots:
        is_plain = slot.dtype == bucket.data.dtype
        size = slot.shape.numel() * slot.dtype.itemsize // bucket.data.element_size()
        shape = tuple(slot.shape) if is_plain and slot.shape else (size,)
        places[slot.offset] = Segment(offset=slot.offset, shape=shape)
    return list(places.values())


class _Both:
    """A coded exchange of parameters and then a whole one of what is not coded."""

    def __init__(self, coded: _Coded, whole: Exchange) -> None:
        self._coded, self._whole = coded, whole

    def run(self, round: Round, met: Sequence[Meeting], iteration: int) -> None:
        self._coded.run(round, met, iteration)
        self._whole.run(round, met, iteration)

    def state(self) -> Mapping[str, torch.Tensor]:
        return self._coded.state()

    def forget(self, peer: int) -> None:
        self._coded.forget(peer)

    @property
    def wait_seconds(self) -> float:
        return self._coded.wait_seconds + self._whole.wait_seconds

    @property
    def bytes_sent(self) -> int:
        return self._coded.bytes_sent + self._whole.bytes_sent

    @property
    def spare_bytes(self) -> int:
        return self._coded.spare_bytes + self._whole.spare_bytes

    @property
    def finished(self) -> set[int]:
        return self._coded.finished

    @property
    def finished_at(self) -> int:
        return self._coded.finished_at

    @finished_at.setter
    def finished_at(self, iteration: int) -> None:
        self._coded.finished_at = self._whole.finished_at = iteration

    @property
    def timeout(self) -> float:
        return self._coded.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._coded.timeout = self._whole.timeout = seconds
