"""The strategies there are, with their options. The one list: everything else reads it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy.typing as npt

from matcha.errors import InputError, unknown_name
from matcha.plans import Plan
from matcha.rounds import Mixing
from matcha.strategies import base, exact, finite_time, own, periodic, silent, vanilla
from matcha.strategies.strategy import Decomposition, Effort, Request, Strategy
from matcha.topology import Link

Weights: TypeAlias = Literal["metropolis"] | Mapping[Link, float] | npt.ArrayLike

# Strategies that search import their machinery when they plan: `import matcha` stays quick.


@dataclass(frozen=True, kw_only=True)
class Vanilla(Strategy):
    """All links at every iteration.

    Args:
        alpha: Your own mixing weight; by default the one with the smallest ρ.
        weights: Your own weights of links: a symmetric matrix W that says what a full exchange
            does, `{(i, j): w, …}`, or `"metropolis"`.
    """

    name = "vanilla"
    about = "all links at every iteration"
    mixings = ("laplacian",)
    compared = True
    has_budget = False
    alpha: float | None = None
    weights: Weights | None = None

    def build(self, request: Request) -> Plan:
        """Plan a full exchange at every iteration."""
        return vanilla.build(request)


@dataclass(frozen=True, kw_only=True)
class Periodic(Strategy):
    """All links, every so often.

    Args:
        alpha: As for `Vanilla`.
        weights: As for `Vanilla`.
    """

    name = "periodic"
    about = "all links, every so often"
    mixings = ("laplacian",)
    compared = True
    alpha: float | None = None
    weights: Weights | None = None

    def build(self, request: Request) -> Plan:
        """Plan a full exchange every 1/C_b iterations."""
        return periodic.build(request)


@dataclass(frozen=True, kw_only=True)
class Matcha(Strategy):
    """Each matching by a coin of its own: the paper's method.

    Args:
        mixing: `laplacian` (the paper's I − αL, the default) or `pairwise`.
        decomposition: What the links are split into: `matchings`, single `links`, `cliques`.
        effort: How long to search for a good decomposition: `none`, `default` or `high`.
        probabilities: Your own, one per matching; by default the best.
        alpha: As for `Vanilla`.
        weights: As for `Vanilla`, with laplacian mixing.
    """

    name = "matcha"
    about = "each matching by a coin of its own (the paper)"
    mixings = ("laplacian", "pairwise")
    compared = True
    mixing: Mixing | None = None
    decomposition: Decomposition = "matchings"
    effort: Effort = "default"
    probabilities: Iterable[float] | None = None
    alpha: float | None = None
    weights: Weights | None = None

    def build(self, request: Request) -> Plan:
        """Decompose, optimise probabilities (eq. 5), then the weight (eq. 9)."""
        from matcha.strategies import matcha

        return matcha.build(
            request,
            decomposition=self.decomposition,
            effort=self.effort,
            probabilities=self.probabilities,  # type: ignore[arg-type]  # a tuple once checked
        )


@dataclass(frozen=True, kw_only=True)
class Greedy(Strategy):
    """The matchings that remove most disagreement, one after another, as a stored cycle.

    Args:
        mixing: `pairwise` (the default), or `push` for messages that go one way.
        effort: How long to search for a good cycle: `none`, `default` or `high`.
        alpha: Your own weight of every exchange; by default the best found.
    """

    name = "greedy"
    about = "the matchings that remove most disagreement, as a cycle"
    mixings = ("pairwise", "push")
    compared = True
    mixing: Mixing | None = None
    effort: Effort = "default"
    alpha: float | None = None

    def build(self, request: Request) -> Plan:
        """Search for a cycle: exactly on small graphs, by sketch on large ones."""
        from matcha.strategies import greedy

        return greedy.build(request, self.effort)


@dataclass(frozen=True, kw_only=True)
class AllReduce(Strategy):
    """The exact average at every iteration, as DDP has it."""

    name = "allreduce"
    about = "the exact average at every iteration, as DDP has it"
    mixings = ("average",)
    compared = True
    has_budget = False
    takes_wire = False

    def build(self, request: Request) -> Plan:
        """Plan an exact average after every iteration."""
        return exact.allreduce(request)


@dataclass(frozen=True, kw_only=True)
class Local(Strategy):
    """The exact average as often as the budget allows: local SGD."""

    name = "local"
    about = "the exact average every so often (local SGD)"
    mixings = ("average",)
    compared = True
    takes_wire = False

    def build(self, request: Request) -> Plan:
        """Plan an exact average every H iterations."""
        return exact.local(request)


@dataclass(frozen=True, kw_only=True)
class Silent(Strategy):
    """No communication at all: a control."""

    name = "silent"
    about = "no communication at all: a control"
    mixings = ("pairwise",)
    compared = True
    has_budget = False
    is_control = True
    takes_wire = False

    def build(self, request: Request) -> Plan:
        """Plan no exchange, ever."""
        return silent.build(request)


@dataclass(frozen=True, kw_only=True)
class Single(Strategy):
    """At most one matching per iteration, drawn.

    Args:
        mixing: `laplacian` or `pairwise`: with one matching at a time they are the same.
        probabilities: Your own, one per matching; by default the best.
        alpha: As for `Vanilla`.
        weights: As for `Vanilla`, with laplacian mixing.
    """

    name = "single"
    about = "at most one matching per iteration, drawn"
    mixings = ("laplacian", "pairwise")
    mixing: Mixing | None = None
    probabilities: Iterable[float] | None = None
    alpha: float | None = None
    weights: Weights | None = None

    def build(self, request: Request) -> Plan:
        """Optimise the probabilities with which one matching is drawn."""
        from matcha.strategies import single

        return single.build(request, self.probabilities)  # type: ignore[arg-type]  # a tuple now


@dataclass(frozen=True, kw_only=True)
class Hypercube(Strategy):
    """One dimension of a hypercube after another, for a power of two workers."""

    name = "hypercube"
    about = "one dimension of a hypercube after another: exact consensus every log2(m) rounds"
    mixings = ("pairwise",)

    def build(self, request: Request) -> Plan:
        """Plan the dimensions in turn."""
        return finite_time.hypercube(request)


@dataclass(frozen=True, kw_only=True)
class Base(Strategy):
    """Groups of at most b that average, for any number of workers.

    Args:
        mixing: `laplacian` (the default), or `pairwise`, which leaves base 2 only.
    """

    name = "base"
    about = "groups of at most b: exact consensus in about 2 log_b(m) rounds, for any m"
    mixings = ("laplacian", "pairwise")
    mixing: Mixing | None = None

    def build(self, request: Request) -> Plan:
        """Plan the base that takes least time to agree."""
        return base.build(request)


@dataclass(frozen=True, kw_only=True)
class OnePeer(Strategy):
    """Each worker sends 1, 2, 4, … places on: the one-peer exponential graph."""

    name = "one-peer"
    about = "each worker sends 1, 2, 4, … places on: the one-peer exponential graph"
    mixings = ("push",)

    def build(self, request: Request) -> Plan:
        """Plan the hops in turn."""
        from matcha.strategies import one_peer

        return one_peer.build(request)


@dataclass(frozen=True, kw_only=True)
class Ceca(Strategy):
    """Sums that hop: the exact mean of any number of workers."""

    name = "ceca"
    about = "sums that hop: the exact mean of any m by ⌈log2 m⌉ messages at once"
    mixings = ("windows",)

    def build(self, request: Request) -> Plan:
        """Plan all hops at once, as often as the budget allows."""
        from matcha.strategies import ceca

        return ceca.build(request)


@dataclass(frozen=True, kw_only=True)
class Rounds(Strategy):
    """Your own list of rounds, repeated.

    Args:
        rounds: Each a list of matchings, which are lists of pairs of worker numbers; an empty round
            is an iteration without exchanges.
        mixing: `pairwise` (the default), `laplacian`, or `push` for (sender, receiver).
        alpha: Your own mixing weight.
        weights: As for `Vanilla`, with laplacian mixing.
    """

    name = "rounds"
    about = "your own list of rounds, repeated"
    mixings = ("pairwise", "laplacian", "push")
    needs_rounds = True
    has_budget = False
    rounds: Iterable[Iterable[Iterable[Sequence[int]]]] | None = None
    mixing: Mixing | None = None
    alpha: float | None = None
    weights: Weights | None = None

    def build(self, request: Request) -> Plan:
        """Plan to repeat the rounds."""
        return own.build(request, self.rounds)


_ALL: tuple[type[Strategy], ...] = (
    Vanilla,
    Periodic,
    Matcha,
    Greedy,
    AllReduce,
    Local,
    Silent,
    Single,
    Hypercube,
    Base,
    OnePeer,
    Ceca,
    Rounds,
)

STRATEGIES: Mapping[str, type[Strategy]] = {strategy.name: strategy for strategy in _ALL}
"""By name, in the order in which they are shown."""
OFFERED = tuple(strategy.name for strategy in _ALL if not strategy.needs_rounds)
"""What can be asked for by name alone, as on the command line."""
COMPARED = tuple(strategy.name for strategy in _ALL if strategy.compared)
"""What is compared by default."""


def strategy_named(name: str) -> type[Strategy]:
    """The strategy of a name.

    Raises:
        InputError: There is none; suggests the nearest.

    >>> strategy_named("vanilla").has_budget
    False
    """
    if name not in STRATEGIES:
        raise unknown_name("strategy", str(name), STRATEGIES)
    return STRATEGIES[name]


def make_strategy(name: str, **options: Any) -> Strategy:
    """A strategy by name, with its options.

    Raises:
        InputError: There is none of this name, or it does not take one of the options.

    >>> make_strategy("greedy", effort="none")
    Greedy(mixing=None, effort='none', alpha=None)
    """
    chosen = strategy_named(name)
    for option in options:
        if option not in chosen.options():
            able = [some.name for some in _ALL if option in some.options()]
            raise InputError(
                f"the {name} strategy takes no {option}: leave it out, or use {', '.join(able)}."
            )
    return chosen(**options)


def as_strategy(given: str | Strategy) -> Strategy:
    """A strategy itself, or by its name."""
    return given if isinstance(given, Strategy) else make_strategy(given)


def strategy_with(name: str, **options: Any) -> Strategy:
    """A strategy by name, with those of the options that it takes.

    >>> strategy_with("vanilla", effort="none")
    Vanilla(alpha=None, weights=None)
    """
    chosen = strategy_named(name)
    return chosen(**{key: value for key, value in options.items() if key in chosen.options()})


def has_budget(name: str) -> bool:
    """Whether a strategy's budget decides anything; a user's own has one."""
    return name not in STRATEGIES or STRATEGIES[name].has_budget


def is_control(name: str) -> bool:
    """Whether a strategy is there for comparison only."""
    return name in STRATEGIES and STRATEGIES[name].is_control


def with_budget(name: str, budget: float) -> str:
    """A strategy and its budget, where it has one.

    >>> with_budget("greedy", 0.1), with_budget("vanilla", 1.0)
    ('greedy 0.1', 'vanilla')
    """
    return f"{name} {budget:g}" if has_budget(name) else name
