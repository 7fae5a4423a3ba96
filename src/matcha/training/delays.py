"""Delays: the simulated clock."""

from __future__ import annotations

import math
from dataclasses import dataclass

from matcha.errors import InputError
from matcha.topology.topology import MAX_SECONDS


@dataclass(frozen=True, kw_only=True, slots=True)
class Delays:
    """The simulated clock: an iteration costs computing plus what its round exchanges.

    >>> Delays(compute_seconds=0.045, seconds_per_unit=0.007).of(units=5.0, unit="units")
    0.035
    """

    compute_seconds: float | None = None
    """Of one worker's gradient; None takes the first epoch's time on this device over m."""
    seconds_per_unit: float = 0.01
    """Of a matching, where the plan counts in units; plans in seconds speak for themselves."""
    speeds: tuple[float, ...] = ()
    """Of each worker: 0.25 takes four times the seconds of a gradient. With speeds a worker in step
    waits for the partners of its round only; without any the clock counts whole rounds."""

    def __post_init__(self) -> None:
        for name in ("compute_seconds", "seconds_per_unit"):
            value = getattr(self, name)
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise InputError(f"{name} must be a number of seconds, not {value}")
            if value is not None and value > MAX_SECONDS:
                raise InputError(f"{name} is {value:g}, but it is at most {MAX_SECONDS:g} seconds")
        if not all(speed > 0 and math.isfinite(speed) for speed in self.speeds):
            raise InputError(f"speeds must be above 0, not {', '.join(map(str, self.speeds))}")

    def of(self, units: float, unit: str) -> float:
        """Seconds of communication."""
        return units * self.seconds_per_unit if unit == "units" else units
