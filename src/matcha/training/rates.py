"""Learning-rate schedules of the paper (Appendix A.1): pure functions of progress."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import ClassVar

from matcha.errors import InputError


@dataclass(frozen=True, kw_only=True, slots=True)
class RateSchedule:
    """The learning rate as a function of the epoch and of the losses seen so far.

    All begin with a base rate that is reached by a linear warm-up.
    """

    follows_loss: ClassVar[bool] = False
    """Whether the rate depends on the losses: then each epoch ends with an evaluation."""
    base: float
    warmup: float = 0.0
    """Epochs over which the rate climbs linearly from ``start``."""
    start: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.base < math.inf:
            raise InputError(f"the learning rate must be above 0, not {self.base}")
        if self.warmup < 0:
            raise InputError(f"warm-up must not be negative: {self.warmup}")
        factor = getattr(self, "factor", 1.0)
        if not factor > 0:
            raise InputError(f"the decay factor must be above 0, not {factor}")

    def rate(self, epoch: float, losses: Sequence[float] = ()) -> float:
        """η at a (fractional) epoch, given the average model's loss after each epoch so far."""
        raise NotImplementedError

    def scaled(self, factor: float) -> RateSchedule:
        """The same with all rates multiplied."""
        return replace(self, base=factor * self.base, start=factor * self.start)

    def _warm(self, epoch: float) -> float:
        if epoch >= self.warmup:
            return self.base
        return self.start + (self.base - self.start) * epoch / self.warmup


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant(RateSchedule):
    """The same learning rate throughout, after the warm-up."""

    def rate(self, epoch: float, losses: Sequence[float] = ()) -> float:
        return self._warm(epoch)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDecay(RateSchedule):
    """Divide the rate by ``factor`` at each milestone; the paper's image tasks.

    >>> paper = StepDecay(base=0.8, milestones=(100, 150), factor=10)
    >>> [round(paper.rate(epoch), 6) for epoch in (0, 99.9, 100, 160)]
    [0.8, 0.8, 0.08, 0.008]
    """

    milestones: tuple[float, ...] = ()
    factor: float = 10.0

    def rate(self, epoch: float, losses: Sequence[float] = ()) -> float:
        drops = sum(epoch >= milestone for milestone in self.milestones)
        return self._warm(epoch) / self.factor**drops


@dataclass(frozen=True, kw_only=True, slots=True)
class Plateau(RateSchedule):
    """Divide the rate by ``factor`` after each epoch without a gain; the paper's PTB task.

    >>> paper = Plateau(base=40.0, factor=4)
    >>> paper.rate(3, losses=(5.0, 4.8, 4.9))
    10.0
    """

    follows_loss: ClassVar[bool] = True
    factor: float = 4.0

    def rate(self, epoch: float, losses: Sequence[float] = ()) -> float:
        best = accumulate(losses, min, initial=math.inf)
        drops = sum(not loss < before for loss, before in zip(losses, best, strict=False))
        return self._warm(epoch) / self.factor**drops


@dataclass(frozen=True, kw_only=True, slots=True)
class Cosine(RateSchedule):
    """Decay from the base to a share of it along half a cosine; usual for language models.

    >>> rates = Cosine(base=1.0, epochs=10, warmup=2)
    >>> [round(rates.rate(epoch), 3) for epoch in (1, 2, 6, 10)]
    [0.5, 1.0, 0.55, 0.1]
    """

    epochs: float
    """When the descent ends."""
    final: float = 0.1
    """What is left of the base at the end."""

    def __post_init__(self) -> None:
        RateSchedule.__post_init__(self)
        if not self.epochs > self.warmup:
            raise InputError(f"the warm-up of {self.warmup} epochs must end before {self.epochs}")

    def rate(self, epoch: float, losses: Sequence[float] = ()) -> float:
        done = min(1.0, max(0.0, (epoch - self.warmup) / (self.epochs - self.warmup)))
        share = self.final + (1 - self.final) * (1 + math.cos(math.pi * done)) / 2
        return share * self._warm(epoch)
