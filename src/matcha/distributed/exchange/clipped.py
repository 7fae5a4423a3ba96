"""Clipped meetings: none moves a worker further than the plan's disagreement allows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from matcha.distributed.exchange.exchange import Meeting
from matcha.distributed.exchange.turns import Around, Runner, copy_values, take_turns
from matcha.distributed.transports.base import Message, Tag, Transport
from matcha.rounds import Round
from matcha.training.clipping import kept_share, renewed_reach

__all__ = ["Clipped"]


class Clipped(Around):
    """Carries out rounds one meeting at a time and cuts each move to length.

    The definition is `matcha.training.clipping`. It costs two copies of the values and eight bytes
    per meeting.

    Args:
        runner: carries the meetings out.
        transport: what it does so by.
        values: what the meetings change.
        allowance: how many times its reach a worker's difference to a partner may be.
    """

    def __init__(
        self,
        runner: Runner,
        transport: Transport,
        values: Sequence[torch.Tensor],
        allowance: float,
    ) -> None:
        super().__init__(runner)
        self._transport, self._all = transport, values
        self._values = [v for v in values if v.is_floating_point() or v.is_complex()]
        self._allowance = allowance
        self._before = [torch.empty_like(value) for value in self._values]
        self._after = [value.clone() for value in self._values]
        self._reach = torch.zeros((), dtype=torch.float64)
        self._now = 0.0

    def state(self) -> Mapping[str, torch.Tensor]:
        """What later rounds depend on."""
        return {"reach": self._reach, **{f"after-{k}": a for k, a in enumerate(self._after)}}

    def open(self) -> None:
        """A round begins: this worker has gone its way since the last one with a meeting."""
        moved = _squares(self._values, self._after)
        self._now = renewed_reach(float(self._reach), moved)

    def close(self, *, met: bool) -> None:
        """The round is over; one without a meeting leaves nothing behind."""
        if met:
            self._reach.fill_(self._now)
            copy_values(self._after, self._values)

    def run(self, round: Round, met: Sequence[Meeting], iteration: int) -> None:
        """As `Exchange.run`."""

        def hold(meeting: Meeting) -> bool:
            copy_values(self._before, self._values)
            mine = torch.tensor([self._now], dtype=torch.float64)
            theirs = mine.clone()
            message = Message(peer=meeting.peer, tag=Tag.CLIP, incoming=theirs, outgoing=mine)
            pending = self._transport.post([message])
            self._runner.run(round, (meeting,), iteration)
            pending.wait(self.timeout)
            self._cut(meeting.weight, float(theirs))
            return True

        take_turns(self._all, round, met, hold)

    def _cut(self, weight: float, theirs: float) -> None:
        reach = min(self._now, theirs) if theirs >= 0 else self._now
        limit = weight * self._allowance * math.sqrt(reach)
        share = kept_share(math.sqrt(_squares(self._values, self._before)), limit)
        if share == 1:
            return
        for value, before in zip(self._values, self._before, strict=True):
            if share == 0:
                value.copy_(before)  # what it is may be no number
            else:
                value.sub_(before).mul_(share).add_(before)


def _squares(xs: Sequence[torch.Tensor], ys: Sequence[torch.Tensor]) -> float:
    """The squared distance; infinite where it is no number."""
    total = sum(float((x - y).abs().double().square().sum()) for x, y in zip(xs, ys, strict=True))
    return total if math.isfinite(total) else math.inf
