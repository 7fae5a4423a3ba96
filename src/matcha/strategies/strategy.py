"""Strategies and requests: how a plan is made, and what is asked of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import numpy.typing as npt

from matcha._numerics import ProgressCallback
from matcha.errors import InputError, unknown_name
from matcha.matchings import decompose
from matcha.plans import Plan
from matcha.rounds import MIXINGS, Mixing
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
            if value is not None and option in _CHECKS:
                object.__setattr__(self, option, _CHECKS[option](self, value))

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


# -- options, checked -----------------------------------------------------------------------------


def _check_mixing(strategy: Strategy, mixing: Any) -> Any:
    if _check_name("mixing", mixing, MIXINGS) not in strategy.mixings:
        raise InputError(
            f"the {strategy.name} strategy has {' or '.join(strategy.mixings)} mixing, not "
            f"{mixing}: leave mixing out, or choose another strategy."
        )
    return mixing


def _check_name(kind: str, name: Any, known: Sequence[Any]) -> Any:
    if name not in known:
        raise unknown_name(kind, str(name), known)
    return name


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


def _check_probabilities(strategy: Strategy, given: Any) -> tuple[float, ...]:
    try:
        return tuple(float(p) for p in given)
    except (TypeError, ValueError):
        raise InputError("probabilities are a list of numbers, one per matching.") from None


def _check_whole(name: str) -> Callable[[Strategy, Any], int]:
    def check(_: Strategy, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{name} is {value!r}, but it is a whole number from 1 up.")
        return value

    return check


_CHECKS: Mapping[str, Callable[[Strategy, Any], Any]] = {
    "mixing": _check_mixing,
    "effort": lambda _, effort: _check_name("effort", effort, EFFORTS),
    "decomposition": lambda _, name: _check_name("decomposition", name, DECOMPOSITIONS),
    "alpha": _check_alpha,
    "probabilities": _check_probabilities,
    "period": _check_whole("period"),
}
