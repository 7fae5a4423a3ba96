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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from matcha._io import Registry
from matcha.errors import InputError, PlanError
from matcha.timing import Timing, count_chances
from matcha.topology import Matching

Active = tuple[int, ...]
Coin = tuple[float, Active]
"""A probability, and the matchings that are active together with it."""

_BITS = 53
_BLOCK = 4096
_KNOWN = 1 << 16  # different rounds remembered while drawing in order
_LONGEST_PERIOD = 2000


class Schedule(Protocol):
    """Which matchings, by their positions in the plan, are active at iteration k.

    Theory and plans ask these members; nothing else tells kinds of schedules apart.
    """

    @property
    def seed(self) -> int:
        """The seed of the draws; where nothing is drawn, of the search that made the schedule."""

    @property
    def probabilities(self) -> tuple[float, ...]:
        """The share of iterations in which each matching is used."""

    @property
    def uses(self) -> tuple[float, ...]:
        """How many times per iteration each matching is used, on average."""

    @property
    def period(self) -> tuple[Active, ...] | None:
        """One period of rounds that repeat for ever; None where rounds are drawn."""

    @property
    def coins(self) -> tuple[Coin, ...]:
        """What is drawn at every iteration; empty where rounds repeat."""

    @property
    def exclusive(self) -> bool:
        """Whether at most one coin falls heads per iteration, instead of each independently."""

    @property
    def largest(self) -> tuple[Active, ...]:
        """Rounds of which every round is a subset."""

    def active(self, k: int) -> Active:
        """The matchings of iteration k, in the order of exchange."""

    def actives(self, start: int, stop: int | None) -> Iterator[Active]:
        """The matchings of iterations start to stop, in order."""

    def expected_time(self, timing: Timing, matchings: Sequence[Matching]) -> float:
        """The mean communication time of an iteration."""

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


class _Drawn(ABC):
    """Common parts of schedules of random rounds."""

    probabilities: tuple[float, ...]
    seed: int

    def _check(self) -> None:
        for p in self.probabilities:
            if not 0 <= p <= 1:
                raise PlanError(f"an activation probability is {p!r}, but it must be in [0, 1].")
        check_seed(self.seed)

    @property
    def uses(self) -> tuple[float, ...]:
        return self.probabilities


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

    exclusive = False

    def __post_init__(self) -> None:
        self._check()
        if self.groups:
            members = sorted(j for group in self.groups for j in group)
            if members != list(range(len(self.probabilities))):
                raise PlanError("the groups of a schedule must name every matching once.")
            for group in self.groups:
                if len({self.probabilities[j] for j in group}) != 1:
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

    def active(self, k: int) -> Active:
        heads = _random_bits(self.seed, k, 1, len(self.coins))[0] < self._thresholds
        return self._members(heads)

    def actives(self, start: int, stop: int | None) -> Iterator[Active]:
        width = len(self.coins)

        @lru_cache(maxsize=_KNOWN)  # equal rounds are built once
        def members(packed: bytes) -> Active:
            bits = np.unpackbits(np.frombuffer(packed, dtype=np.uint8), count=width)
            return self._members(bits.astype(bool))

        for k, size in _blocks(start, stop):
            heads = _random_bits(self.seed, k, size, width) < self._thresholds
            packed = np.packbits(heads, axis=1)
            step, data = packed.shape[1], packed.tobytes()
            for row in range(size):
                yield members(data[row * step : (row + 1) * step])

    def _members(self, heads: npt.NDArray[np.bool_]) -> Active:
        return tuple(sorted(j for c in np.flatnonzero(heads).tolist() for j in self.coins[c][1]))

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
    period = None

    def __post_init__(self) -> None:
        self._check()
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

    def active(self, k: int) -> Active:
        return self._drawn(_random_bits(self.seed, k, 1, 1)[:, 0])[0]

    def actives(self, start: int, stop: int | None) -> Iterator[Active]:
        for k, size in _blocks(start, stop):
            yield from self._drawn(_random_bits(self.seed, k, size, 1)[:, 0])

    def _drawn(self, bits: npt.NDArray[np.uint64]) -> list[Active]:
        drawn = np.searchsorted(self._thresholds, bits, side="right")
        options: list[Active] = [*((j,) for j in range(len(self.probabilities))), ()]
        return [options[j] for j in drawn]

    def expected_time(self, timing: Timing, matchings: Sequence[Matching]) -> float:
        times = (timing.matching_time(matching) for matching in matchings)
        return sum(p * t for p, t in zip(self.probabilities, times, strict=True))

    def to_json(self) -> dict[str, Any]:
        return {"kind": "choice"}


# -- rounds that repeat --------------------------------------------------------------------------


class _Repeated(ABC):
    """Common parts of schedules of rounds that repeat: nothing is drawn."""

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
    """All matchings, in a fraction `frequency` of the iterations, evenly spaced.

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
        return (self.frequency,) * self.num_matchings

    @property
    def uses(self) -> tuple[float, ...]:
        return self.probabilities

    @cached_property
    def period(self) -> tuple[Active, ...]:
        """One period; where that is long, the period of the nearest frequency with a short one.

        >>> Periodic(frequency=0.4, num_matchings=2).period
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
class Cycle(_Repeated):
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
    def probabilities(self) -> tuple[float, ...]:
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
        "periodic": lambda document, p, seed: Periodic(
            frequency=float(document["frequency"]), num_matchings=len(p), seed=seed
        ),
        "cycle": lambda document, p, seed: Cycle(
            cycle=_rows(document["cycle"]), num_matchings=len(p), seed=seed
        ),
    },
)
"""How saved schedules are read, by kind; `read` takes (document, probabilities, seed)."""
register_schedule = SCHEDULES.register


# -- random bits --------------------------------------------------------------------------------


def _threshold(p: float) -> int:
    """How many of the 2^53 equally likely integers mean "active"."""
    return round(p * float(2**_BITS))


def _random_bits(seed: int, k: int, count: int, width: int) -> npt.NDArray[np.uint64]:
    """53 random bits for each of `width` coins at iterations k, …, k + count − 1.

    Each iteration owns ⌈width / 4⌉ counters of Philox4x64, which gives four words per counter.
    """
    counters = -(-width // 4)
    first = k * counters
    words = [(first >> 64 * i) & (2**64 - 1) for i in range(4)]
    generator = np.random.Philox(key=seed, counter=words)
    raw = generator.random_raw(count * counters * 4)
    bits: npt.NDArray[np.uint64] = raw.reshape(count, counters * 4)[:, :width] >> np.uint64(
        64 - _BITS
    )
    return bits


def _blocks(start: int, stop: int | None) -> Iterator[tuple[int, int]]:
    check_iteration(start)
    k = start
    while stop is None or k < stop:
        size = _BLOCK if stop is None else min(_BLOCK, stop - k)
        yield k, size
        k += size
