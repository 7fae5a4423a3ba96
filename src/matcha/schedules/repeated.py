"""Schedules of rounds that repeat: nothing is drawn."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from matcha.errors import PlanError
from matcha.schedules.schedule import Active, Coin, check_iteration, check_seed
from matcha.timing import Timing
from matcha.topology import Matching

_LONGEST_PERIOD = 2000


class _Repeated(ABC):
    """What schedules of rounds that repeat share: nothing is drawn."""

    exclusive = False
    coins: tuple[Coin, ...] = ()

    @property
    @abstractmethod
    def period(self) -> tuple[Active, ...]: ...

    @abstractmethod
    def active(self, k: int) -> Active: ...

    @property
    def largest(self) -> tuple[Active, ...]:
        return tuple(dict.fromkeys(self.period))

    def actives(self, start: int, stop: int | None) -> Iterator[Active]:
        check_iteration(start)
        k = start
        while stop is None or k < stop:
            yield self.active(k)
            k += 1


@dataclass(frozen=True)
class Periodic(_Repeated):
    """Every matching, in a fraction `frequency` of the iterations, evenly spaced.

    >>> schedule = Periodic(frequency=0.5, num_matchings=2)
    >>> [schedule.active(k) for k in range(4)]
    [(), (0, 1), (), (0, 1)]
    """

    frequency: float
    num_matchings: int
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.frequency <= 1:
            raise PlanError(f"the frequency is {self.frequency!r}, but it must be in (0, 1].")
        check_seed(self.seed)

    @property
    def probabilities(self) -> tuple[float, ...]:
        """The frequency, for all of them."""
        return (self.frequency,) * self.num_matchings

    @property
    def uses(self) -> tuple[float, ...]:
        """The frequency, for all of them."""
        return self.probabilities

    @cached_property
    def period(self) -> tuple[Active, ...]:
        """One period; of a frequency without a short one, that of its nearest neighbour.

        >>> Periodic(frequency=0.4, num_matchings=2).period
        ((), (), (0, 1), (), (0, 1))
        """
        n, d = self._exact.limit_denominator(_LONGEST_PERIOD).as_integer_ratio()
        return tuple(self._all if (k + 1) * n // d > k * n // d else () for k in range(d))

    @cached_property
    def _exact(self) -> Fraction:
        # The decimal the user typed, so that 0.3 means 3 in 10 and not a binary neighbour.
        return Fraction(repr(float(self.frequency)))

    @cached_property
    def _all(self) -> Active:
        return tuple(range(self.num_matchings))

    def active(self, k: int) -> Active:
        """All matchings when the accrued frequency passes a whole number at iteration k."""
        n, d = self._exact.numerator, self._exact.denominator
        return self._all if (k + 1) * n // d > k * n // d else ()

    def expected_time(self, timing: Timing, matchings: Sequence[Matching]) -> float:
        """The share of a full exchange."""
        return self.frequency * timing.round_time(matchings)

    def to_json(self) -> dict[str, Any]:
        """The schedule as plain JSON values."""
        return {"kind": "periodic", "frequency": self.frequency}


@dataclass(frozen=True)
class Cycle(_Repeated):
    """A finite list of rounds, repeated for ever.

    >>> schedule = Cycle(cycle=((0,), (), (1, 0)), num_matchings=2)
    >>> schedule.active(5)
    (1, 0)
    >>> schedule.probabilities
    (0.666..., 0.333...)
    """

    cycle: tuple[Active, ...]
    num_matchings: int
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if not self.cycle:
            raise PlanError("a cycle needs at least one round.")
        if any(not 0 <= j < self.num_matchings for active in self.cycle for j in active):
            raise PlanError("its cycle names a matching that is not there.")

    @cached_property
    def probabilities(self) -> tuple[float, ...]:
        """The share of the cycle's rounds that use each matching."""
        return self._shares(j for active in self.cycle for j in set(active))

    @cached_property
    def uses(self) -> tuple[float, ...]:
        """Uses a round, where some rounds use a matching more than once."""
        return self._shares(j for active in self.cycle for j in active)

    def _shares(self, used: Iterable[int]) -> tuple[float, ...]:
        counts = Counter(used)
        return tuple(counts[j] / len(self.cycle) for j in range(self.num_matchings))

    @property
    def period(self) -> tuple[Active, ...]:
        """The cycle itself."""
        return self.cycle

    def active(self, k: int) -> Active:
        """Round k modulo the cycle's length."""
        return self.cycle[k % len(self.cycle)]

    def expected_time(self, timing: Timing, matchings: Sequence[Matching]) -> float:
        """The mean over the cycle."""
        times = [timing.round_time([matchings[j] for j in active]) for active in self.cycle]
        return math.fsum(times) / len(times)

    def to_json(self) -> dict[str, Any]:
        """The schedule as plain JSON values."""
        return {"kind": "cycle", "cycle": [list(active) for active in self.cycle]}
