"""What a schedule is: which matchings are active at iteration k.

Every schedule is a pure function of k, so that all workers agree without talking, iteration k is
reached without generating the first k − 1, and resuming is free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from matcha.errors import InputError, PlanError
from matcha.timing import Timing
from matcha.topology import Matching

Active = tuple[int, ...]
Coin = tuple[float, Active]
"""A probability, and the matchings that are active together with it."""


class Schedule(Protocol):
    """Which matchings, by their positions in the plan, are active at iteration k.

    What theory and plans ask of a schedule, it answers itself: no one else tells kinds apart.
    """

    @property
    def seed(self) -> int:
        """What decides the draws; where nothing is drawn, what the search for it began with."""

    @property
    def probabilities(self) -> tuple[float, ...]:
        """In which share of the iterations each matching is used."""

    @property
    def uses(self) -> tuple[float, ...]:
        """How many times an iteration each matching is used, on average."""

    @property
    def period(self) -> tuple[Active, ...] | None:
        """One period of rounds that repeat for ever; None where rounds are drawn."""

    @property
    def coins(self) -> tuple[Coin, ...]:
        """What is drawn at every iteration; empty where rounds repeat."""

    @property
    def exclusive(self) -> bool:
        """Whether at most one coin falls heads at a time, instead of each independently."""

    @property
    def largest(self) -> tuple[Active, ...]:
        """Rounds of which every round is a part."""

    def active(self, k: int) -> Active:
        """The matchings of iteration k, in the order of exchange."""

    def actives(self, start: int, stop: int | None) -> Iterator[Active]:
        """The matchings of iterations start to stop, in order."""

    def expected_time(self, timing: Timing, matchings: Sequence[Matching]) -> float:
        """The mean communication time of an iteration."""

    def to_json(self) -> dict[str, Any]:
        """The schedule as plain JSON values; probabilities and seed stand beside it in a plan."""


def check_seed(seed: int) -> None:
    """Refuse a seed that the generator cannot take.

    Raises:
        PlanError: It is negative or has more than 128 bits.
    """
    if not 0 <= seed < 2**128:
        raise PlanError(f"the seed is {seed!r}, but it must be in 0 .. 2^128 - 1.")


def check_iteration(k: int) -> None:
    """Refuse an iteration before the first.

    Raises:
        InputError: k is below 0.
    """
    if k < 0:
        raise InputError(f"iterations count from 0, but round {k} was asked for.")
