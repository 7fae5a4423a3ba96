"""Strategies and requests: how a plan is made, what is asked of it, and what strategies share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import numpy.typing as npt

from matcha._numerics import Certificate, ProgressCallback
from matcha.errors import InputError, PlanError, unknown_name
from matcha.matchings import decompose
from matcha.mixing import periodic_contraction
from matcha.plans import Plan
from matcha.rounds import MIXINGS, Mixing, RoundProcess, Shares
from matcha.schedules import Schedule
from matcha.theory import consensus_error
from matcha.timing import Timing
from matcha.topology import Link, Matching, Topology

Effort: TypeAlias = Literal["none", "default", "high"]
Decomposition: TypeAlias = Literal["matchings", "links", "cliques"]

Alpha: TypeAlias = float | Literal["rho", "error"]
"""A mixing weight of your own, or what the best one is best for: ρ, as in the paper, or the
consensus error."""
Weights: TypeAlias = Literal["metropolis"] | Mapping[Link, float] | npt.ArrayLike

EFFORTS: tuple[Effort, ...] = get_args(Effort)
DECOMPOSITIONS: tuple[Decomposition, ...] = get_args(Decomposition)

LONGEST_CYCLE = 2_000_000
"""Rounds that a plan may store, the silent ones among them: a file of about 15 megabytes."""
_COMPARED_UP_TO = 2000
_WEIGHED_UP_TO = 64  # workers: two seconds, for the exact error some twenty times


@dataclass(frozen=True, kw_only=True)
class Request:
    """What `plan` hands to a strategy, checked."""

    topology: Topology
    budget: float
    strategy: str
    """The name that the plan will have."""
    seed: int
    mixing: Mixing
    """The strategy's choice, or its own for links that carry one way."""
    timing: Timing
    matchings: tuple[Matching, ...] | None = None
    """The user's own decomposition; None: find one."""
    alpha: Alpha | None = None
    """The user's own mixing weight, or what it is to be best for; None: the strategy's choice."""
    weights: Mapping[Link, float] | None = None
    """The user's own for each link, in place of a mixing weight."""
    progress: ProgressCallback | None = None
    """Called with (done, total, what the steps are) while long searches run."""

    @cached_property
    def colors(self) -> tuple[Matching, ...]:
        """The matchings of a full exchange, whose time the budget is a fraction of."""
        return self.matchings or decompose(self.topology, seed=self.seed)

    @cached_property
    def full_time(self) -> float:
        """The time of a full exchange."""
        return self.timing.round_time(self.colors)


Builder: TypeAlias = Callable[[Request], Plan]


@dataclass(frozen=True, kw_only=True)
class Strategy(ABC):
    """One way to make a plan, with its options as fields.

    A subclass is a frozen dataclass. Fields called `mixing`, `effort`, `decomposition`,
    `probabilities` and `alpha` are checked when it is made.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    """In a few words, for help texts."""
    mixings: ClassVar[tuple[Mixing, ...]]
    """What it can mix by, its own choice first."""
    compared: ClassVar[bool] = False
    """Whether sweeps, pages and the demo show it by default."""
    needs_rounds: ClassVar[bool] = False
    """Whether the user must bring the rounds: a name alone is not enough."""
    is_control: ClassVar[bool] = False
    """Whether it is there for comparison only and never wins."""
    has_budget: ClassVar[bool] = True
    """Whether the budget decides anything; without, its plans stand once in a sweep, at 1."""
    takes_wire: ClassVar[bool] = True
    """Whether its messages can be smaller; an all-reduce's are whole, silence has none."""

    def __post_init__(self) -> None:
        for option in self.options():
            value = getattr(self, option)
            if value is not None:
                object.__setattr__(self, option, _check_option(self, option, value))

    @classmethod
    def options(cls) -> tuple[str, ...]:
        """The names of its options."""
        return tuple(field.name for field in fields(cls))

    @classmethod
    def budgets(cls, wanted: Iterable[float]) -> list[float]:
        """The budgets of a sweep at which it has a plan of its own, rising."""
        return sorted(set(wanted)) if cls.has_budget else [1.0]

    def wires(self, wanted: Iterable[str], topology: Topology) -> list[str]:
        """Those of the wires that its messages can have on these links; whole values if none."""
        return list(dict.fromkeys(wanted)) if self.takes_wire else ["float32"]

    @property
    def label(self) -> str:
        """The name that its plans have."""
        return self.name

    @abstractmethod
    def build(self, request: Request) -> Plan:
        """Plan what was asked for."""


@dataclass(frozen=True, kw_only=True)
class OwnStrategy(Strategy):
    """A user's function as a strategy."""

    name = "own"
    about = "your own function from a request to a plan"
    mixings = MIXINGS
    function: Builder

    @property
    def label(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def build(self, request: Request) -> Plan:
        return self.function(request)


_NAMES: Mapping[str, tuple[str, ...]] = {
    "mixing": MIXINGS,
    "effort": EFFORTS,
    "decomposition": DECOMPOSITIONS,
}


def _check_option(strategy: Strategy, option: str, value: Any) -> Any:
    """What an option was set to, checked; one that is not known here stays as it is."""
    if option in _NAMES and value not in _NAMES[option]:
        raise unknown_name(option, str(value), _NAMES[option])
    if option == "mixing" and value not in strategy.mixings:
        raise InputError(
            f"the {strategy.name} strategy has {' or '.join(strategy.mixings)} mixing, not "
            f"{value}: leave mixing out, or choose another strategy."
        )
    if option == "alpha":
        return _check_alpha(strategy, value)
    if option == "probabilities":
        try:
            return tuple(float(p) for p in value)
        except (TypeError, ValueError):
            raise InputError("probabilities are a list of numbers, one per matching.") from None
    if option == "period" and (type(value) is not int or value < 1):
        raise InputError(f"period is {value!r}, but it is a whole number from 1 up.")
    return value


def _check_alpha(strategy: Strategy, alpha: Any) -> Alpha:
    if getattr(strategy, "weights", None) is not None:
        raise InputError("alpha and weights were both given: leave one out.")
    if alpha == "rho" and strategy.mixings[0] != "laplacian":
        raise InputError(f"{strategy.name} has no weight that is best for rho: leave alpha out.")
    if alpha in ("rho", "error"):
        return alpha  # type: ignore[no-any-return]
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 < alpha <= 1:
        raise InputError(
            f"alpha is {alpha!r}, but a mixing weight is a number in (0, 1], 'rho' or 'error'."
        )
    return float(alpha)


# -- the finished plan, and checks of what the user brought ---------------------------------------


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

    Matchings and budget are those of the request, where no others are given; the user's own weights
    take the place of the strategy's. Figures are those of `RoundProcess.remember` that were found
    on the way. `beside_periodic` notes where periodic communication would contract faster.
    """
    known, matchings, remarks = dict(figures), matchings or request.colors, list(notes)
    if isinstance(request.alpha, float):
        remarks.append(
            f"the mixing weight {request.alpha:.4g} is yours; {alpha:.4g} was found best."
        )
        alpha, weights, known = request.alpha, None, {}
    if request.weights is not None:
        weights = tuple(tuple(request.weights[e] for e in links) for links in matchings)
        known = {}
        remarks.append("the weights of links are yours.")
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
            remarks.append("the mixing weight is the best for rho: too many workers for another.")
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
    )
    own = plan.smallest_self_weight
    if own < -1e-12:
        remarks.append(
            f"a worker may give its own model the weight {own:.3f}, below zero: such mixing "
            "extrapolates and can diverge at large learning rates."
        )
    if beside_periodic and plan.num_workers <= _COMPARED_UP_TO:
        spent = min(1.0, plan.expected_comm_time / request.full_time)
        other = periodic_contraction(plan.topology, spent).rho
        if other < plan.rho - 1e-9:
            remarks.append(
                "periodic communication contracts faster here in the same time: "
                f"rho {other:.4f} instead of {plan.rho:.4f}."
            )
    return replace(plan, notes=tuple(remarks))


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


def sort_pairs(given: Any, *, push: bool = False) -> tuple[Matching, ...]:
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


# -- pacing: communication time is spent as it accrues, iteration by iteration ---------------------


def timeline(costs: Sequence[Fraction], rate: Fraction) -> list[tuple[int, list[int]]]:
    """Spend time as it accrues: turns of iterations, each with what becomes affordable at its end.

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
    """Turns as rounds, one per iteration: all empty but the last of a turn."""
    turns = list(turns)
    check_storable(sum(iterations for iterations, _ in turns))
    rounds: list[tuple[int, ...]] = []
    for iterations, active in turns:
        rounds += [()] * (iterations - 1)
        rounds.append(active)
    return tuple(rounds)


def check_storable(rounds: int) -> None:
    """Refuse a plan of more rounds than it may store."""
    if rounds > LONGEST_CYCLE:
        # Floats end at 1e308.
        many = f"{rounds:,}" if rounds < 10**9 else f"about 1e{len(str(rounds)) - 1}"
        raise InputError(
            f"at this budget the plan repeats after {many} iterations, more than the "
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
