"""Pacing: communication time is spent as it accrues, iteration by iteration."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import chain, repeat

from matcha.errors import InputError

LONGEST_CYCLE = 2_000_000
"""Rounds that a plan may store, the silent ones among them: a file of about 15 megabytes."""


def timeline(costs: Sequence[Fraction], rate: Fraction) -> list[tuple[int, list[int]]]:
    """Spend time as it accrues: turns of iterations, each with what becomes affordable at its end.

    >>> timeline([Fraction(1)] * 3, Fraction(1, 2))
    [(2, [0]), (2, [1]), (2, [2])]
    >>> timeline([Fraction(1)] * 5, Fraction(5, 2))
    [(1, [0, 1]), (1, [2, 3, 4])]
    """
    turns: list[tuple[int, list[int]]] = []
    spent, before = Fraction(0), 0
    for n, cost in enumerate(costs):
        spent += cost
        due = math.ceil(spent / rate)
        if due > before:
            turns.append((due - before, []))
            before = due
        turns[-1][1].append(n)
    return turns


def unroll(turns: Iterable[tuple[int, tuple[int, ...]]]) -> tuple[tuple[int, ...], ...]:
    """Turns as rounds, one per iteration.

    >>> unroll([(2, (0,)), (1, (1,))])
    ((), (0,), (1,))
    """
    turns = list(turns)
    check_storable(sum(iterations for iterations, _ in turns))
    return tuple(
        round_
        for iterations, active in turns
        for round_ in chain(repeat((), iterations - 1), (active,))
    )


def check_storable(rounds: int) -> None:
    """Refuse a plan of more rounds than it may store."""
    if rounds > LONGEST_CYCLE:
        raise InputError(
            f"at this budget the plan repeats after {_short(rounds)} iterations, more than the "
            f"{LONGEST_CYCLE:,} that it can store: raise the budget, or use matcha or periodic, "
            "which store none."
        )


def simple(share: Fraction, largest: int) -> Fraction:
    """The share itself, or the simple fraction that rounding has made it miss: 1/7 of 7 is 1.

    >>> simple(Fraction("0.14285714285714285"), 1000), simple(Fraction("1e-9"), 1000)
    (Fraction(1, 7), Fraction(1, 1000000000))
    """
    found = share.limit_denominator(largest)
    return found if abs(found - share) < share / 10**9 else share


def _short(number: int) -> str:
    """A whole number for people, however large: floats end at 1e308."""
    return f"{number:,}" if number < 10**9 else f"about 1e{len(str(number)) - 1}"
