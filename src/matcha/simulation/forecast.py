"""The forecast: what consensus distance a plan makes of the spread of the workers' steps.

A plan's consensus error c is a steady state: of steps that are independent, and of a learning rate
that stays. Training has neither, so the forecast follows two moments from iteration to iteration.
With x a worker's deviation from the average, v that of its step, D = E‖x‖², P = E⟨x, v⟩ and
V = E‖v‖², a mode that a round shrinks by w obeys

    x⁺ = w(x − ηv):     D⁺ = w²(D − 2ηP + η²V)
    v⁺ = κv + noise:    P⁺ = wκ(P − ηV)

whose steady state is c·η²V(1 + wκ)/(1 − wκ) for the w with c = w²/(1 − w²). V is measured, and so
is the correlation of one step with the next, which tells two kinds of steps apart: drift, which
stays (heterogeneous data pull each worker its own way: κ = 1), and noise, which momentum remembers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

_Moments: TypeAlias = tuple[float, float]
"""D and P of one kind of steps."""


@dataclass(kw_only=True, slots=True)
class Forecast:
    """The moments so far."""

    momentum: float
    noise: _Moments = (0.0, 0.0)
    drift: _Moments = (0.0, 0.0)
    spread: float | None = None
    """V after the last epoch; None before the first."""

    def advance(
        self, rates: Sequence[float], spread: float, similarity: float, error: float
    ) -> float:
        """The consensus distance after iterations at these learning rates.

        Args:
            rates: the learning rate of each.
            spread: V at their end; in between it changes by equal factors.
            similarity: the correlation of the last step with the one before.
            error: of the plan, per mode: c·m/(m − 1).
        """
        before = spread if self.spread is None else self.spread
        w = math.sqrt(error / (1 + error)) if math.isfinite(error) else 1.0
        share = min(max((similarity - self.momentum) / (1 - self.momentum), 0.0), 1.0)
        memory = max(min(similarity, self.momentum), 0.0)
        for k, rate in enumerate(rates, start=1):
            v = _between(before, spread, k / len(rates))
            self.noise = _advance(self.noise, rate, (1 - share) * v, w, memory)
            self.drift = _advance(self.drift, rate, share * v, w, 1.0)
        self.spread = spread
        return self.noise[0] + self.drift[0]

    def state(self) -> list[float | None]:
        """For a checkpoint."""
        return [self.spread, *self.noise, *self.drift]

    def load(self, state: Sequence[float]) -> None:
        """Go on from a checkpoint's."""
        self.spread, *moments = state
        self.noise, self.drift = (moments[0], moments[1]), (moments[2], moments[3])


def _advance(moments: _Moments, rate: float, spread: float, w: float, memory: float) -> _Moments:
    distance, correlation = moments
    distance = w**2 * max(distance - 2 * rate * correlation + rate**2 * spread, 0.0)
    return distance, w * memory * (correlation - rate * spread)


def _between(first: float, last: float, share: float) -> float:
    if first > 0 and last > 0:
        return math.exp((1 - share) * math.log(first) + share * math.log(last))
    return first + share * (last - first)
