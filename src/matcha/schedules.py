"""Schedules: which round comes at iteration k, by random access.

Every schedule is a pure function of k, so that all workers agree without talking, iteration k is
reached without generating the first k − 1, and resuming is free. Random rounds read the Philox
counter-based generator, whose stream numpy guarantees across versions and machines; bits are
compared as integers, so no rounding can differ.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from matcha._io import Registry
from matcha.errors import InputError, PlanError
from matcha.timing import Timing, count_chances
from matcha.topology import Matching

Active = tuple[int, ...]
Coin = tuple[float, Active]
_BITS = 53
_BLOCK = 4096
_KNOWN = 1 << 16  # different rounds remembered while drawing in order
_LONGEST_PERIOD = 2000


class Schedule(ABC):
    """Which matchings, by their positions in the plan, are active at iteration k.

    Theory and plans ask these members; nothing else tells kinds of schedules apart.
    """

    probabilities: tuple[float, ...]
    """The share of iterations in which each matching is used."""
    seed: int
    """The seed of the draws; where nothing is drawn, of the search that made the schedule."""
    exclusive = False
    """Whether at most one coin falls heads per iteration, instead of each independently."""

    @property
    def uses(self) -> tuple[float, ...]:
        """How many times per iteration each matching is used, on average."""
        return self.probabilities

    @property
    def period(self) -> tuple[Active, ...] | None:
        """One period of rounds that repeat for ever; None where rounds are drawn."""
        return None

    @property
    def coins(self) -> tuple[Coin, ...]:
        """What is drawn at every iteration; empty where rounds repeat."""
        return ()

    @property
    def largest(self) -> tuple[Active, ...]:
        """Rounds of which every round is a subset."""
        return tuple(dict.fromkeys(self.period or ()))

    @abstractmethod
    def active(self, k: int) -> Active:
        """The matchings of iteration k, in the order of exchange."""

    def actives(self, start: int, stop: int | None) -> Iterator[Active]:
        """The matchings of iterations start to stop, in order."""
        check_iteration(start)
        k = start
        while stop is None or k < stop:
            yield self.active(k)
            k += 1

    @abstractmethod
    def expected_time(self, timing: Timing, matchings: Sequence[Matching]) -> float:
        """The mean communication time of an iteration."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """The schedule as plain JSON values; probabilities and seed stand beside it in a plan."""


def check_seed(seed: int) -> int:
    """Refuse a seed that the generator cannot take."""
    if isinstance(seed, bool) or not hasattr(seed, "__index__") or not 0 <= seed < 2**128:
        raise PlanError(f"the seed is {seed!r}, but it is a whole number from 0 up, below 2^128.")
    return operator.index(seed)


def check_iteration(k: int) -> None:
    """Refuse an iteration before the first, or between two."""
    if not hasattr(k, "__index__"):
        raise InputError(f"iterations are whole numbers, but round {k!r} was asked for.")
    if k < 0:
        raise InputError(f"iterations count from 0, but round {k} was asked for.")


# -- random rounds -------------------------------------------------------------------------------


class _Drawn(Schedule):
    """Rounds that are drawn, in blocks."""

    def __post_init__(self) -> None:
        for p in self.probabilities:
            if not 0 <= p <= 1:
                raise PlanError(f"an activation probability is {p!r}, but it must be in [0, 1].")
        check_seed(self.seed)

    @abstractmethod
    def _draw(self, k: int, size: int) -> Iterable[Hashable]:
        """What is drawn at some iterations."""

    @abstractmethod
    def _members(self, drawn: Any) -> Active:
        """The matchings that a draw activates."""

    def active(self, k: int) -> Active:
        return next(map(self._members, self._draw(k, 1)))

    def actives(self, start: int, stop: int | None) -> Iterator[Active]:
        check_iteration(start)
        members = lru_cache(maxsize=_KNOWN)(self._members)  # equal rounds are built once
        k = start
        while stop is None or k < stop:
            size = _BLOCK if stop is None else min(_BLOCK, stop - k)
            yield from map(members, self._draw(k, size))
            k += size


@dataclass(frozen=True)
class Bernoulli(_Drawn):
    """Independent coins: group g of matchings is active with probability p_g (step 3).

    Matchings of one group share a coin; without groups each matching is its own.

    >>> Bernoulli(probabilities=(1.0, 0.0), seed=7).active(123)
    (0,)
    """

    probabilities: tuple[float, ...]
    """One per matching; equal within a group."""
    seed: int
    groups: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        members = sorted(j for group in self.groups for j in group)
        if self.groups and members != list(range(len(self.probabilities))):
            raise PlanError("the groups of a schedule must name every matching once.")
        if any(len({self.probabilities[j] for j in group}) != 1 for group in self.groups):
            raise PlanError("matchings that share a coin must share its probability.")

    @cached_property
    def coins(self) -> tuple[Coin, ...]:
        groups = self.groups or tuple((j,) for j in range(len(self.probabilities)))
        return tuple((self.probabilities[group[0]], group) for group in groups)

    @cached_property
    def period(self) -> tuple[Active, ...] | None:
        certain = all(p in (0.0, 1.0) for p in self.probabilities)
        return self.largest if certain else None

    @cached_property
    def largest(self) -> tuple[Active, ...]:
        return (tuple(j for j, p in enumerate(self.probabilities) if p > 0),)

    @cached_property
    def _thresholds(self) -> npt.NDArray[np.uint64]:
        return np.array([_threshold(p) for p, _ in self.coins], dtype=np.uint64)

    def _draw(self, k: int, size: int) -> Iterable[bytes]:
        heads = _random_bits(self.seed, k, size, len(self.coins)) < self._thresholds
        return (row.tobytes() for row in heads)

    def _members(self, drawn: bytes) -> Active:
        heads = np.flatnonzero(np.frombuffer(drawn, dtype=np.bool_)).tolist()
        return tuple(sorted(j for c in heads for j in self.coins[c][1]))

    def expected_time(self, timing: Timing, matchings: Sequence[Matching]) -> float:
        """The expected time of a round; matchings that share a coin are active together."""
        costs = timing.costs(matchings)
        additive = np.isclose(sum(costs), timing.round_time(matchings))
        if not self.groups or additive:
            return timing.expected_time(matchings, self.probabilities)
        # Under t(n) only the number of active matchings counts: convolve the coins.
        chances = count_chances((p, len(group)) for p, group in self.coins)
        times = [timing.round_time(matchings[:n]) for n in range(len(chances))]
        return float(chances @ times)

    def to_json(self) -> dict[str, Any]:
        return {"kind": "bernoulli", "groups": [list(group) for group in self.groups]}


@dataclass(frozen=True)
class Choice(_Drawn):
    """At most one matching per iteration: matching j with probability p_j, Σ p_j <= 1.

    >>> Choice(probabilities=(0.0, 1.0), seed=0).active(5)
    (1,)
    """

    probabilities: tuple[float, ...]
    seed: int
    exclusive = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if sum(self.probabilities) > 1 + 1e-9:
            raise PlanError("the probabilities of a choice of one matching sum to more than 1.")

    @cached_property
    def coins(self) -> tuple[Coin, ...]:
        return tuple((p, (j,)) for j, p in enumerate(self.probabilities))

    @cached_property
    def largest(self) -> tuple[Active, ...]:
        return tuple((j,) for j, p in enumerate(self.probabilities) if p > 0)

    @cached_property
    def _thresholds(self) -> npt.NDArray[np.uint64]:
        sums = np.cumsum(self.probabilities)
        sums[sums > 1 - 1e-12] = 1.0
        return np.array([_threshold(float(p)) for p in sums], dtype=np.uint64)

    def _draw(self, k: int, size: int) -> list[int]:
        bits = _random_bits(self.seed, k, size, 1)[:, 0]
        drawn: list[int] = np.searchsorted(self._thresholds, bits, side="right").tolist()
        return drawn

    def _members(self, drawn: int) -> Active:
        return (drawn,) if drawn < len(self.probabilities) else ()

    def expected_time(self, timing: Timing, matchings: Sequence[Matching]) -> float:
        times = (timing.matching_time(matching) for matching in matchings)
        return sum(p * t for p, t in zip(self.probabilities, times, strict=True))

    def to_json(self) -> dict[str, Any]:
        return {"kind": "choice"}


def _threshold(p: float) -> int:
    """How many of the 2^53 equally likely integers mean "active"."""
    return round(p * float(2**_BITS))


def _random_bits(seed: int, k: int, count: int, width: int) -> npt.NDArray[np.uint64]:
    """53 random bits for each of `width` coins at iterations k, …, k + count − 1.

    Each iteration owns ⌈width / 4⌉ counters of Philox4x64, which gives four words per counter.
    """
    counters = -(-width // 4)
    words = [(k * counters >> 64 * i) & (2**64 - 1) for i in range(4)]
    raw = np.random.Philox(key=seed, counter=words).random_raw(count * counters * 4)
    bits: npt.NDArray[np.uint64] = raw.reshape(count, -1)[:, :width] >> np.uint64(64 - _BITS)
    return bits


# -- rounds that repeat --------------------------------------------------------------------------


@dataclass(frozen=True)
class EvenlySpaced(Schedule):
    """All matchings, in a fraction `frequency` of the iterations, evenly spaced.

    >>> schedule = EvenlySpaced(frequency=0.5, num_matchings=2)
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

    @cached_property
    def probabilities(self) -> tuple[float, ...]:  # type: ignore[override]
        return (self.frequency,) * self.num_matchings

    @cached_property
    def period(self) -> tuple[Active, ...]:
        """One period; where that is long, the period of the nearest frequency with a short one.

        >>> EvenlySpaced(frequency=0.4, num_matchings=2).period
        ((), (), (0, 1), (), (0, 1))
        """
        short = self._exact.limit_denominator(_LONGEST_PERIOD)
        return tuple(self._active(k, short) for k in range(short.denominator))

    @cached_property
    def _exact(self) -> Fraction:
        # The decimal the user typed, so that 0.3 means 3 in 10 and not a binary neighbour.
        return Fraction(repr(float(self.frequency)))

    def active(self, k: int) -> Active:
        return self._active(k, self._exact)

    def _active(self, k: int, frequency: Fraction) -> Active:
        """All matchings when the accrued frequency passes a whole number at iteration k."""
        n, d = frequency.as_integer_ratio()
        return tuple(range(self.num_matchings)) if (k + 1) * n // d > k * n // d else ()

    def expected_time(self, timing: Timing, matchings: Sequence[Matching]) -> float:
        return self.frequency * timing.round_time(matchings)

    def to_json(self) -> dict[str, Any]:
        return {"kind": "periodic", "frequency": self.frequency}


@dataclass(frozen=True)
class Cycle(Schedule):
    """A finite list of rounds, repeated without end.

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
            raise PlanError("its cycle names a matching that does not exist.")

    @cached_property
    def probabilities(self) -> tuple[float, ...]:  # type: ignore[override]
        return self._shares(j for active in self.cycle for j in set(active))

    @cached_property
    def uses(self) -> tuple[float, ...]:
        return self._shares(j for active in self.cycle for j in active)

    def _shares(self, used: Iterable[int]) -> tuple[float, ...]:
        counts = Counter(used)
        return tuple(counts[j] / len(self.cycle) for j in range(self.num_matchings))

    @property
    def period(self) -> tuple[Active, ...]:
        return self.cycle

    def active(self, k: int) -> Active:
        return self.cycle[k % len(self.cycle)]

    def expected_time(self, timing: Timing, matchings: Sequence[Matching]) -> float:
        times = [timing.round_time([matchings[j] for j in active]) for active in self.cycle]
        return math.fsum(times) / len(times)

    def to_json(self) -> dict[str, Any]:
        return {"kind": "cycle", "cycle": [list(active) for active in self.cycle]}


# -- in files -----------------------------------------------------------------------------------


def _rows(rows: Iterable[Iterable[Any]]) -> tuple[Active, ...]:
    return tuple(tuple(map(operator.index, row)) for row in rows)


SCHEDULES: Registry[Schedule] = Registry(
    "schedule",
    "kind",
    "matcha.schedules.register_schedule",
    {
        "bernoulli": lambda document, p, seed: Bernoulli(
            probabilities=p, seed=seed, groups=_rows(document["groups"])
        ),
        "choice": lambda _, p, seed: Choice(probabilities=p, seed=seed),
        "periodic": lambda document, p, seed: EvenlySpaced(
            frequency=float(document["frequency"]), num_matchings=len(p), seed=seed
        ),
        "cycle": lambda document, p, seed: Cycle(
            cycle=_rows(document["cycle"]), num_matchings=len(p), seed=seed
        ),
    },
)
"""How saved schedules are read, by kind; `read` takes (document, probabilities, seed)."""
register_schedule = SCHEDULES.register
