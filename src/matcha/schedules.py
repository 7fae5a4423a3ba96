"""Schedules: which matchings are active at iteration k.

Every schedule is a pure function of k, so that all workers agree without talking, iteration k is
reached without generating the first k − 1, and resuming is free. Random ones read the Philox
counter-based generator, whose stream numpy guarantees across versions and machines; bits are
compared as integers, so no rounding can differ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from matcha.errors import PlanError

Active = tuple[int, ...]
_BITS = 53
_BLOCK = 4096


class Schedule(Protocol):
    """Which matchings, by their positions in the plan, are active at iteration k."""

    def active(self, k: int) -> Active:
        """The matchings of iteration k, in the order of exchange."""

    def actives(self, start: int, stop: int | None) -> Iterator[Active]:
        """The matchings of iterations start to stop, in order."""

    def to_json(self) -> dict[str, Any]:
        """The schedule as plain JSON values."""


class _InTurn(ABC):
    """Schedules for which one iteration costs the same alone as in order."""

    @abstractmethod
    def active(self, k: int) -> Active: ...

    def actives(self, start: int, stop: int | None) -> Iterator[Active]:
        k = start
        while stop is None or k < stop:
            yield self.active(k)
            k += 1


@dataclass(frozen=True)
class Bernoulli:
    """Independent coins: group g of matchings is active with probability p_g (step 3).

    Matchings of one group share a coin; without groups each matching is its own.

    >>> Bernoulli(probabilities=(1.0, 0.0), seed=7).active(123)
    (0,)
    """

    probabilities: tuple[float, ...]
    """One a matching; equal within a group."""
    seed: int
    groups: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        _check_probabilities(self.probabilities)
        _check_seed(self.seed)
        if self.groups:
            members = sorted(j for group in self.groups for j in group)
            if members != list(range(len(self.probabilities))):
                raise PlanError("the groups of a schedule must name every matching once.")
            for group in self.groups:
                if len({self.probabilities[j] for j in group}) != 1:
                    raise PlanError("matchings that share a coin must share its probability.")

    @cached_property
    def _coins(self) -> tuple[tuple[int, ...], ...]:
        return self.groups or tuple((j,) for j in range(len(self.probabilities)))

    @cached_property
    def _thresholds(self) -> npt.NDArray[np.uint64]:
        chances = [self.probabilities[coin[0]] for coin in self._coins]
        return np.array([_threshold(p) for p in chances], dtype=np.uint64)

    def active(self, k: int) -> Active:
        """The matchings whose coins fall heads at iteration k."""
        heads = _random_bits(self.seed, k, 1, len(self._coins))[0] < self._thresholds
        return self._members(np.flatnonzero(heads).tolist())

    def actives(self, start: int, stop: int | None) -> Iterator[Active]:
        """The same in order, drawn a block at a time and interned: many rounds are alike."""
        known: dict[bytes, Active] = {}
        for k, size in _blocks(start, stop):
            heads = _random_bits(self.seed, k, size, len(self._coins)) < self._thresholds
            packed = np.packbits(heads, axis=1)
            width, data = packed.shape[1], packed.tobytes()
            for row in range(size):
                key = data[row * width : (row + 1) * width]
                active = known.get(key)
                if active is None:
                    active = self._members(np.flatnonzero(heads[row]).tolist())
                    if len(known) < 1 << 16:
                        known[key] = active
                yield active

    def _members(self, coins: Sequence[int]) -> Active:
        return tuple(sorted(j for c in coins for j in self._coins[c]))

    def to_json(self) -> dict[str, Any]:
        """The schedule as plain JSON values; probabilities and seed are the plan's."""
        return {"kind": "bernoulli", "groups": [list(group) for group in self.groups]}


@dataclass(frozen=True)
class Choice:
    """At most one matching an iteration: matching j with probability p_j, Σ p_j <= 1.

    >>> Choice(probabilities=(0.0, 1.0), seed=0).active(5)
    (1,)
    """

    probabilities: tuple[float, ...]
    seed: int

    def __post_init__(self) -> None:
        _check_probabilities(self.probabilities)
        _check_seed(self.seed)
        if sum(self.probabilities) > 1 + 1e-9:
            raise PlanError("the probabilities of a choice of one matching sum to more than 1.")

    @cached_property
    def _thresholds(self) -> npt.NDArray[np.uint64]:
        sums = np.cumsum(self.probabilities)
        sums[sums > 1 - 1e-12] = 1.0
        return np.array([_threshold(float(p)) for p in sums], dtype=np.uint64)

    def active(self, k: int) -> Active:
        """The matching drawn at iteration k, if any."""
        return self._drawn(_random_bits(self.seed, k, 1, 1)[:, 0])[0]

    def actives(self, start: int, stop: int | None) -> Iterator[Active]:
        """The same in order, drawn a block at a time."""
        for k, size in _blocks(start, stop):
            yield from self._drawn(_random_bits(self.seed, k, size, 1)[:, 0])

    def _drawn(self, bits: npt.NDArray[np.uint64]) -> list[Active]:
        drawn = np.searchsorted(self._thresholds, bits, side="right")
        options: list[Active] = [*((j,) for j in range(len(self.probabilities))), ()]
        return [options[j] for j in drawn]

    def to_json(self) -> dict[str, Any]:
        """The schedule as plain JSON values; probabilities and seed are the plan's."""
        return {"kind": "choice"}


@dataclass(frozen=True)
class Periodic(_InTurn):
    """Every matching, in a fraction `frequency` of the iterations, evenly spaced.

    >>> schedule = Periodic(frequency=0.5, num_matchings=2)
    >>> [schedule.active(k) for k in range(4)]
    [(), (0, 1), (), (0, 1)]
    """

    frequency: float
    num_matchings: int

    @cached_property
    def _exact(self) -> Fraction:
        # The decimal the user typed, so that 0.3 means 3 in 10 and not a binary neighbour.
        return Fraction(repr(float(self.frequency)))

    def active(self, k: int) -> Active:
        """All matchings when the accrued frequency passes a whole number at iteration k."""
        n, d = self._exact.numerator, self._exact.denominator
        due = (k + 1) * n // d > k * n // d
        return tuple(range(self.num_matchings)) if due else ()

    def to_json(self) -> dict[str, Any]:
        """The schedule as plain JSON values."""
        return {"kind": "periodic", "frequency": self.frequency}


@dataclass(frozen=True)
class Cycle(_InTurn):
    """A finite list of rounds, repeated for ever.

    >>> Cycle(cycle=((0,), (), (1, 0))).active(5)
    (1, 0)
    """

    cycle: tuple[Active, ...]

    def __post_init__(self) -> None:
        if not self.cycle:
            raise PlanError("a cycle needs at least one round.")

    def active(self, k: int) -> Active:
        """Round k modulo the cycle's length."""
        return self.cycle[k % len(self.cycle)]

    def to_json(self) -> dict[str, Any]:
        """The schedule as plain JSON values."""
        return {"kind": "cycle", "cycle": [list(active) for active in self.cycle]}


def schedule_from_json(
    document: Any, probabilities: tuple[float, ...], seed: int
) -> Bernoulli | Choice | Periodic | Cycle:
    """The schedule in a saved plan.

    Raises:
        PlanError: The document does not describe a schedule for these matchings.
    """
    kind = document.get("kind") if isinstance(document, dict) else None
    if kind == "bernoulli":
        groups = tuple(tuple(group) for group in document["groups"])
        return Bernoulli(probabilities=probabilities, seed=seed, groups=groups)
    if kind == "choice":
        return Choice(probabilities=probabilities, seed=seed)
    if kind == "periodic":
        return Periodic(frequency=document["frequency"], num_matchings=len(probabilities))
    if kind == "cycle":
        cycle = tuple(tuple(active) for active in document["cycle"])
        if any(not 0 <= j < len(probabilities) for active in cycle for j in active):
            raise PlanError("its cycle names a matching that is not there.")
        return Cycle(cycle=cycle)
    raise PlanError(f"its schedule kind {kind!r} is unknown.")


# -- random bits --------------------------------------------------------------------------------


def _threshold(p: float) -> int:
    """How many of the 2^53 equally likely integers mean "active"."""
    return round(p * float(2**_BITS))


def _random_bits(seed: int, k: int, count: int, width: int) -> npt.NDArray[np.uint64]:
    """53 random bits for each of `width` coins at iterations k, …, k + count − 1.

    Each iteration owns ⌈width / 4⌉ counters of Philox4x64, which gives four words a counter.
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
    k = start
    while stop is None or k < stop:
        size = _BLOCK if stop is None else min(_BLOCK, stop - k)
        yield k, size
        k += size


def _check_probabilities(probabilities: Sequence[float]) -> None:
    for p in probabilities:
        if not 0 <= p <= 1:
            raise PlanError(f"an activation probability is {p!r}, but it must be in [0, 1].")


def _check_seed(seed: int) -> None:
    if not 0 <= seed < 2**128:
        raise PlanError(f"the seed is {seed!r}, but it must be in 0 .. 2^128 - 1.")
