"""Pacing: communication time is spent as it accrues, an iteration at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import chain, repeat


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


def unrolled(turns: Iterable[tuple[int, tuple[int, ...]]]) -> tuple[tuple[int, ...], ...]:
    """Turns as rounds, one an iteration.

    >>> unrolled([(2, (0,)), (1, (1,))])
    ((), (0,), (1,))
    """
    return tuple(
        round_
        for iterations, active in turns
        for round_ in chain(repeat((), iterations - 1), (active,))
    )
