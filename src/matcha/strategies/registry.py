"""The strategies there are, with their options and colours: everything else reads it here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from matcha._io import load_object
from matcha.errors import InputError, unknown_name
from matcha.strategies.finite_time import Base, Ceca, Hypercube, OnePeer
from matcha.strategies.fixed import AllReduce, Local, Periodic, RelaySum, Rounds, Silent, Vanilla
from matcha.strategies.greedy import Greedy
from matcha.strategies.matcha import Matcha, Single
from matcha.strategies.outer import DiLoCo, GASLoC, NoLoCo, SparseLoCo
from matcha.strategies.strategy import Alpha, Builder, OwnStrategy, Strategy


class Look(NamedTuple):
    """How a strategy is drawn, in all figures and on the page."""

    color: str
    """In figures, on white."""
    marker: str
    """Matplotlib's name for it."""
    light: str
    """On the page, with contrast enough for its background."""
    dark: str


# Okabe and Ito's palette, told apart by colour-blind readers too.
_ALL: Mapping[type[Strategy], Look] = {
    Vanilla: Look("#000000", "x", "#30363d", "#c9d1d9"),
    Periodic: Look("#D55E00", "^", "#d55e00", "#ff9d57"),
    Matcha: Look("#0072B2", "o", "#0072b2", "#5fb7ec"),
    Greedy: Look("#009E73", "s", "#00875f", "#46cf9f"),
    AllReduce: Look("#7A4FBF", "p", "#a33b3b", "#f09090"),
    Local: Look("#A6761D", "h", "#8a4b00", "#e0a25e"),
    Silent: Look("#999999", "+", "#767b76", "#9aa39a"),
    Single: Look("#CC79A7", "D", "#b3508a", "#f09cca"),
    Hypercube: Look("#E69F00", "v", "#8a6d00", "#e3c04b"),
    Base: Look("#56B4E9", "P", "#6b4fb5", "#b7a2f5"),
    OnePeer: Look("#F0E442", "<", "#6f7d00", "#d4e157"),
    Ceca: Look("#1B9E9E", ">", "#0f7c7c", "#5fd3d3"),
    RelaySum: Look("#3B5BA5", "d", "#3b5ba5", "#8fb0ff"),
    DiLoCo: Look("#B22222", "H", "#a62a2a", "#f2918c"),
    NoLoCo: Look("#4B6EAF", "8", "#41609c", "#9db8ee"),
    GASLoC: Look("#6B8E23", "X", "#55741a", "#b5d46a"),
    SparseLoCo: Look("#8B5A8B", "1", "#7d4a7d", "#d3a3d3"),
    Rounds: Look("#8C6D31", "*", "#7a5c3e", "#d0ae8a"),
}
_OWN = Look("#666666", "o", "#555c52", "#a9b1a6")

STRATEGIES: Mapping[str, type[Strategy]] = {strategy.name: strategy for strategy in _ALL}
"""By name, in the order in which they are shown."""
LOOKS: Mapping[str, Look] = {strategy.name: look for strategy, look in _ALL.items()}
OFFERED = tuple(strategy.name for strategy in _ALL if not strategy.needs_rounds)
"""What can be asked for by name alone, as on the command line."""
COMPARED = tuple(strategy.name for strategy in _ALL if strategy.compared)
"""What is compared by default."""


def strategy_named(name: str) -> type[Strategy]:
    """The strategy of a name.

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
    chosen = _find(name)
    for option in options:
        if option not in chosen.options():
            able = ", ".join(some.name for some in _ALL if option in some.options())
            instead = f", or use {able}" if able else ""
            raise InputError(f"the {name} strategy takes no {option}: leave it out{instead}.")
    return replace(chosen, **options) if isinstance(chosen, Strategy) else chosen(**options)


def as_strategy(given: str | Strategy | Builder) -> Strategy:
    """A strategy itself, by its name or by `module:object`, or a function that makes plans."""
    if isinstance(given, type):
        raise InputError(f"the strategy is a class: make one of it, {given.__name__}().")
    if isinstance(given, Strategy):
        return given
    return OwnStrategy(function=given) if callable(given) else make_strategy(given)


def _find(name: str) -> Strategy | type[Strategy]:
    """The strategy of a name, or a user's own by `module:object`: a class, object or function."""
    if not isinstance(name, str) or ":" not in name:
        return strategy_named(name)
    found = load_object(name, "strategy")
    return as_strategy(
        found() if isinstance(found, type) and issubclass(found, Strategy) else found
    )


def comparable(given: str | Strategy | Builder, alpha: Alpha = "error") -> Strategy:
    """A strategy as it is compared: a weight that was not chosen is the best for what is compared.

    >>> comparable("vanilla").alpha, comparable(Vanilla(alpha=0.2)).alpha, comparable("silent")
    ('error', 0.2, Silent())
    """
    strategy: Any = as_strategy(given)
    if "alpha" not in strategy.options() or strategy.mixings[0] != "laplacian":
        return strategy  # type: ignore[no-any-return]
    own = strategy.alpha is not None or strategy.weights is not None
    return strategy if own else replace(strategy, alpha=alpha)  # type: ignore[no-any-return]


def strategy_with(name: str, **options: Any) -> Strategy:
    """A strategy by name, with those of the options that it takes.

    >>> strategy_with("vanilla", effort="none")
    Vanilla(alpha=None, weights=None)
    """
    able = _find(name).options()
    return make_strategy(name, **{key: value for key, value in options.items() if key in able})


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


def look_of(strategy: str) -> Look:
    """How a strategy is drawn; grey dots for a user's own."""
    return LOOKS.get(strategy, _OWN)
