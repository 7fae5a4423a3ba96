"""Clipping: no meeting moves a worker further than the plan's disagreement allows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from matcha.distributed.exchange.exchange import Exchange
from matcha.distributed.exchange.meeting import Meeting, MeetingHook
from matcha.distributed.transports.base import Message, Pending, Tag
from matcha.training.clipping import kept_share, renewed_reach

__all__ = ["Clipping"]


class Clipping(MeetingHook):
    """Cuts what each meeting moves to length.

    The definition is `matcha.training.clipping`. It costs two copies of the values and eight bytes
    per meeting.

    Args:
        exchange: what holds the meetings.
        values: what they change.
        allowance: how many times its reach a worker's difference to a partner may be.
    """

    def __init__(
        self, exchange: Exchange, values: Sequence[torch.Tensor], allowance: float
    ) -> None:
        self._exchange, self._allowance = exchange, allowance
        self._values = [v for v in values if v.is_floating_point() or v.is_complex()]
        self._before = [torch.empty_like(value) for value in self._values]
        self._after = [value.clone() for value in self._values]
        self._reach = torch.zeros((), dtype=torch.float64)
        self._now = 0.0
        self._theirs = torch.zeros(1, dtype=torch.float64)
        self._pending: Pending | None = None

    def state(self) -> Mapping[str, torch.Tensor]:
        """What later rounds depend on."""
        return {"reach": self._reach, **{f"after-{k}": a for k, a in enumerate(self._after)}}

    def begin_round(self, iteration: int) -> None:
        """As `MeetingHook.begin_round`: how far this worker went since its last meeting."""
        self._now = renewed_reach(float(self._reach), _squares(self._values, self._after))

    def before(self, meeting: Meeting, iteration: int) -> bool:
        """As `MeetingHook.before`: tell each other how far both went."""
        _copy(self._before, self._values)
        mine = torch.tensor([self._now], dtype=torch.float64)
        self._theirs = torch.empty_like(mine)
        message = Message(peer=meeting.peer, tag=Tag.CLIP, incoming=self._theirs, outgoing=mine)
        self._pending = self._exchange.transport.post([message])
        return True

    def after(self, meeting: Meeting) -> None:
        """As `MeetingHook.after`: cut what has moved; none of a NaN is kept."""
        assert self._pending is not None
        self._pending.wait(self._exchange.timeout)
        theirs = float(self._theirs)
        reach = min(self._now, theirs) if theirs >= 0 else self._now
        limit = meeting.weight * self._allowance * math.sqrt(reach)
        share = kept_share(math.sqrt(_squares(self._values, self._before)), limit)
        if share == 0:
            _copy(self._values, self._before)
        elif share != 1:
            for value, before in zip(self._values, self._before, strict=True):
                value.sub_(before).mul_(share).add_(before)

    def end_round(self, num_held: int) -> None:
        """As `MeetingHook.end_round`: one without a meeting changes nothing."""
        if num_held:
            self._reach.fill_(self._now)
            _copy(self._after, self._values)


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _squares(xs: Sequence[torch.Tensor], ys: Sequence[torch.Tensor]) -> float:
    """The squared distance; infinite where it is NaN."""
    total = sum(float((x - y).abs().double().square().sum()) for x, y in zip(xs, ys, strict=True))
    return total if math.isfinite(total) else math.inf
