"""What strategies share: checks of what the user brought, pacing, and the finished plan."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import chain, repeat
from types import MappingProxyType
from typing import Any

from matcha._numerics import Certificate
from matcha.errors import InputError, PlanError
from matcha.mixing import periodic_contraction
from matcha.plans import Plan
from matcha.rounds import RoundProcess, Shares
from matcha.schedules import Schedule
from matcha.strategies.strategy import Request
from matcha.theory import consensus_error
from matcha.topology import Matching

_COMPARED_UP_TO = 2000
_WEIGHED_UP_TO = 64  # workers: two seconds, for the exact error some twenty times


def assemble_plan(
    request: Request,
    *,
    schedule: Schedule,
    alpha: float,
    matchings: tuple[Matching, ...] | None = None,
    weights: Shares | None = None,
    budget: float | None = None,
    figures: Mapping[str, float] = MappingProxyType({}),
    certificate: Certificate | None = None,
    notes: tuple[str, ...] = (),
    beside_periodic: bool = False,
) -> Plan:
    """The plan that a strategy arrived at, with what its user should know in its notes.

    Args:
        request: What was asked for; own weights take the place of the strategy's.
        schedule: When matchings are active.
        alpha: The strategy's mixing weight.
        matchings: What rounds are made of; by default those of a full exchange.
        weights: One for each link of each matching, where they differ.
        budget: What the plan's budget is, where not the one asked for.
        figures: `rho`, `algebraic_connectivity`, `consensus_error` as far as found on the way.
        certificate: Of the probabilities.
        notes: What only the strategy knows.
        beside_periodic: Note where periodic communication would contract faster.
    """
    known, matchings = dict(figures), matchings or request.colors
    if isinstance(request.alpha, float):
        own = f"the mixing weight {request.alpha:.4g} is yours; {alpha:.4g} was found best."
        alpha, weights, known, notes = request.alpha, None, {}, (*notes, own)
    if request.weights is not None:
        weights = tuple(tuple(request.weights[e] for e in links) for links in matchings)
        known, notes = {}, (*notes, "the weights of links are yours.")
    process = RoundProcess(
        topology=request.topology,
        matchings=matchings,
        schedule=schedule,
        mixing=request.mixing,
        alpha=alpha,
        weights=weights,
    )
    if request.alpha == "error":
        best = best_for_error(process)
        if best is None:
            notes = (*notes, "the mixing weight is the best for rho: too many workers for another.")
        elif best != process.alpha:
            process = replace(process, alpha=best)
            known = {k: v for k, v in known.items() if k == "algebraic_connectivity"}
    plan = Plan(
        process=process.remember(**known),
        strategy=request.strategy,
        budget=request.budget if budget is None else budget,
        timing=request.timing,
        num_colors=len(request.colors),
        certificate=certificate,
        notes=notes,
    )
    return _add_notes(plan, request.full_time if beside_periodic else None)


def best_for_error(process: RoundProcess) -> float | None:
    """The mixing weight that minimises the steady-state consensus error; None for many workers.

    ρ is a worst case over directions and the error a mean over them: its best weight is smaller.
    """
    from scipy.optimize import minimize_scalar

    if process.num_workers > _WEIGHED_UP_TO:
        return None

    def error(alpha: float) -> float:
        found = consensus_error(replace(process, alpha=float(alpha)))
        return found if found is not None and math.isfinite(found) else 1e300

    # The error blows up at both ends of the range, and had one minimum wherever we looked.
    high = min(1.6 * process.alpha, 1.0) if process.mixing == "laplacian" else 0.95
    found = minimize_scalar(
        error, bounds=(0.2 * process.alpha, high), method="bounded", options={"xatol": 1e-5}
    )
    return float(found.x) if found.fun <= error(process.alpha) else process.alpha


def check_probabilities(given: Iterable[float], matchings: Sequence[Matching]) -> tuple[float, ...]:
    """Refuse probabilities of which there are more or fewer than matchings."""
    p = tuple(given)
    if len(p) != len(matchings):
        raise InputError(
            f"{len(p)} probabilities were given for {len(matchings)} "
            "matchings: give matchings too, so that it is clear whose they are."
        )
    return p


def check_affordable(request: Request, cost: float, limit: float, what: str) -> None:
    """Refuse what the user brought if it takes more time than the budget allows."""
    if cost > limit * (1 + 1e-9):
        needed = request.budget * cost / limit
        do = f"give budget={needed:.4g}" if needed <= 1 else "use less"
        raise InputError(
            f"{what} take {needed:.4g} of a full exchange's time per iteration, more than the "
            f"budget of {request.budget:g}: {do}."
        )


def sorted_pairs(given: Any, *, push: bool = False) -> tuple[Matching, ...]:
    """Matchings that the user wrote down, with sorted pairs; for push, as (sender, receiver)."""
    try:
        pairs = [[(int(i), int(j)) for i, j in matching] for matching in given]
        if not push:
            pairs = [[(min(pair), max(pair)) for pair in matching] for matching in pairs]
        return tuple(tuple(sorted(matching)) for matching in pairs)
    except (TypeError, ValueError):
        raise PlanError(
            "matchings are lists of pairs of worker numbers, [[(i, j), …], …]."
        ) from None


def _add_notes(plan: Plan, full_time: float | None) -> Plan:
    notes = list(plan.notes)
    own = plan.smallest_self_weight
    if own < -1e-12:
        notes.append(
            f"a worker may give its own model the weight {own:.3f}, below zero: such mixing "
            "extrapolates and can diverge at large learning rates."
        )
    if full_time is not None and plan.num_workers <= _COMPARED_UP_TO:
        spent = min(1.0, plan.expected_comm_time / full_time)
        other = periodic_contraction(plan.topology, spent).rho
        if other < plan.rho - 1e-9:
            notes.append(
                "periodic communication contracts faster here in the same time: "
                f"rho {other:.4f} instead of {plan.rho:.4f}."
            )
    return replace(plan, notes=tuple(notes))


# -- pacing: communication time is spent as it accrues, iteration by iteration ---------------------

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
