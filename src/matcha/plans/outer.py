"""Outer steps: what may follow a round, from each worker's anchor through what the round made."""

from __future__ import annotations

from dataclasses import dataclass

from matcha.errors import InputError


@dataclass(frozen=True, kw_only=True, slots=True)
class OuterStep:
    """A step of its own after each round: v ← βv + α(x̄ − φ), φ ← φ + v, x ← φ.

    φ is where the worker stood after the round before, x̄ what this round made of its parameters.

    >>> OuterStep(momentum=0.5, nesterov=False)
    OuterStep(rate=0.7, momentum=0.5, nesterov=False, rate_first=False)
    """

    rate: float = 0.7
    """α, of the way to x̄."""
    momentum: float = 0.9
    """β, of the step before."""
    nesterov: bool = True
    """Step along α(x̄ − φ) + βv, as DiLoCo does, and not along v, as NoLoCo does."""
    rate_first: bool = False
    """Exchange φ + α(x − φ), as GASLoC does, and not x; after an exact average it is the same."""

    def __post_init__(self) -> None:
        if not (isinstance(self.rate, (int, float)) and 0 < self.rate <= 2):
            raise InputError(f"an outer rate is above 0 and at most 2, not {self.rate!r}.")
        if not (isinstance(self.momentum, (int, float)) and 0 <= self.momentum < 1):
            raise InputError(f"an outer momentum is in [0, 1), not {self.momentum!r}.")
