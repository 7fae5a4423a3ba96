"""Planning: a topology, a budget and a strategy in, a plan out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy.typing as npt

from matcha.errors import InputError, PlanError, unknown_name
from matcha.matchings import check_decomposition
from matcha.mixing import link_weights
from matcha.plans import Plan, check_budget
from matcha.rounds import MIXINGS, ONE_WAY, Mixing
from matcha.strategies.registry import STRATEGIES, Builder, Strategy, own_strategy, strategy_named
from matcha.strategies.request import DECOMPOSITIONS, EFFORTS, Decomposition, Effort, Request
from matcha.timing import Timing, default_timing
from matcha.topology import Link, Matching, Topology, check_matchings
from matcha.wires import Float, Wire, parse_wire
from matcha.wires.delays import budget_over, timing_over


def plan(
    topology: Topology,
    budget: float = 0.5,
    strategy: str | Builder = "matcha",
    seed: int = 0,
    *,
    mixing: Mixing | None = None,
    matchings: Iterable[Iterable[Sequence[int]]] | None = None,
    decomposition: Decomposition = "matchings",
    timing: Timing | None = None,
    effort: Effort = "default",
    probabilities: Iterable[float] | None = None,
    rounds: Iterable[Iterable[Iterable[Sequence[int]]]] | None = None,
    alpha: float | None = None,
    weights: Literal["metropolis"] | Mapping[Link, float] | npt.ArrayLike | None = None,
    wire: str | Wire = "float32",
    progress: Callable[[int, int, str], None] | None = None,
) -> Plan:
    """Plan the communication of decentralized SGD on a topology within a budget.

    Args:
        topology: The workers and their links.
        budget: C_b in (0, 1]: expected communication time an iteration as a fraction of vanilla's.
        strategy: One of `matcha.strategies.STRATEGIES`: `matcha` (the paper), `vanilla`,
            `periodic`, `single`, `greedy`, `hypercube`, `base`, `one-peer` or `ceca`; or your own
            function from a `Request` to a `Plan`.
        seed: Decides which rounds are drawn, and every search on the way.
        mixing: `laplacian` (the paper's I − αL), `pairwise`, or `push` for messages that go one
            way; by default the strategy's own.
        matchings: Your own decomposition of the links, as lists of pairs of worker numbers.
        decomposition: What `matcha` splits the links into: `matchings`, single `links`, `cliques`.
        timing: The delay model; by default link seconds where the topology has them, else units.
        effort: How long to search for a good decomposition: `none`, `default` or `high`.
        probabilities: Your own, one a matching, for `matcha` and `single`.
        rounds: Your own rounds, repeated for ever: each a list of matchings, empty where nobody
            talks.
        alpha: Your own mixing weight; by default the best one.
        weights: Your own weights of links, for laplacian mixing: a symmetric matrix W that says
            what a full exchange does, `{(i, j): w, …}`, or `"metropolis"`.
        wire: What messages hold: `float32`, `bfloat16`, `modulo:8`, `modulo:4`, `modulo:3`,
            `modulo:2`, or `lowrank:R`. The budget keeps its meaning, a share of vanilla's time with
            whole float32 models, so smaller messages buy more rounds.
        progress: Called with (steps done, steps at most, what they are) while long searches run.

    Returns:
        The plan, with its contraction ρ, its expected communication time and its certificate.

    Raises:
        InputError: The budget, a name or the decomposition is not valid.

    >>> from matcha.topology import families
    >>> plan(families.ring(4), budget=1.0, strategy="vanilla").expected_comm_time
    2.0
    """
    chosen = _chosen(strategy, rounds is not None)
    message, whole = parse_wire(wire), timing or default_timing(topology)
    asked = _budget(budget)
    if not isinstance(message, Float) and _mixing(chosen, mixing, topology) in ONE_WAY:
        raise InputError(f"messages that go one way take whole values, not the wire {wire!r}.")
    if message != Float() and _mixing(chosen, mixing, topology) == "average":
        raise InputError(
            f"{chosen.name} averages whole values, not what the wire {message.name!r} holds: "
            "leave the wire out, or use greedy."
        )
    request = Request(
        topology=topology,
        budget=budget_over(topology, whole, message, asked),
        strategy=chosen.name,
        seed=_seed(seed),
        mixing=_mixing(chosen, mixing, topology),
        matchings=None if matchings is None else _own_matchings(topology, matchings),
        decomposition=_decomposition(chosen, decomposition, matchings is not None),
        timing=timing_over(whole, message),
        effort=_known("effort", effort, EFFORTS),
        probabilities=_own_probabilities(chosen, probabilities),
        rounds=None
        if rounds is None
        else _own_rounds(topology, rounds, push=_mixing(chosen, mixing, topology) == "push"),
        alpha=_alpha(alpha),
        weights=_own_weights(chosen, topology, mixing, weights, alpha),
        progress=progress,
    )
    made = chosen.build(request)
    if not isinstance(made, Plan):
        raise InputError(f"the strategy {chosen.name!r} made {type(made).__name__}, not a Plan.")
    kept = asked if made.budget == request.budget else made.budget
    return made if message == Float() else replace(made, wire=message, budget=kept)


# -- what was given, checked ----------------------------------------------------------------------


def _chosen(strategy: str | Builder, has_rounds: bool) -> Strategy:
    """The strategy asked for; the user's own rounds are one of their own."""
    if callable(strategy):
        name = getattr(strategy, "__name__", type(strategy).__name__)
        return own_strategy(name, strategy)
    chosen = strategy_named(strategy)
    if not has_rounds:
        return chosen
    if chosen.name not in ("matcha", "rounds"):
        raise InputError(f"rounds were given, so the {chosen.name} strategy has none to make.")
    return STRATEGIES["rounds"]


def _budget(budget: float) -> float:
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise InputError(f"the budget is {budget!r}, but it is a number in (0, 1].")
    check_budget(float(budget))
    return float(budget)


def _seed(seed: int) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise InputError(f"the seed is {seed!r}, but it is a whole number from 0 up.")
    return seed


def _alpha(alpha: float | None) -> float | None:
    if alpha is None:
        return None
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 < alpha <= 1:
        raise InputError(f"alpha is {alpha!r}, but a mixing weight is a number in (0, 1].")
    return float(alpha)


def _own_weights(
    chosen: Strategy, topology: Topology, mixing: Mixing | None, weights: Any, alpha: float | None
) -> dict[Link, float] | None:
    if weights is None:
        return None
    if alpha is not None:
        raise InputError("alpha and weights were both given: leave one out.")
    if _mixing(chosen, mixing, topology) != "laplacian":
        raise InputError(
            f"the {chosen.name} strategy mixes pair by pair here, but weights of links go with "
            "laplacian mixing: leave them out, or use matcha, vanilla or periodic."
        )
    return link_weights(weights, topology)


def _known(kind: str, name: Any, known: Sequence[Any]) -> Any:
    if name not in known:
        raise unknown_name(kind, str(name), known)
    return name


def _mixing(chosen: Strategy, mixing: Mixing | None, topology: Topology) -> Mixing:
    if topology.directed:
        able = [some for some in chosen.mixings if some in ONE_WAY]
        if not able or mixing not in (None, *able):
            others = ", ".join(n for n, s in STRATEGIES.items() if set(ONE_WAY) & set(s.mixings))
            raise InputError(
                f"links of this topology carry one way, but {mixing or chosen.name} needs both: "
                f"use push mixing, with {others}."
            )
        return able[0]
    if mixing is None:
        return chosen.mixings[0]
    if _known("mixing", mixing, MIXINGS) not in chosen.mixings:
        others = ", ".join(name for name, s in STRATEGIES.items() if mixing in s.mixings)
        raise InputError(
            f"the {chosen.name} strategy has {chosen.mixings[0]} mixing: leave mixing out; "
            f"{mixing} mixing goes with {others}."
        )
    return mixing


def _decomposition(
    chosen: Strategy, decomposition: Decomposition, has_matchings: bool
) -> Decomposition:
    if _known("decomposition", decomposition, DECOMPOSITIONS) == "matchings":
        return decomposition
    if has_matchings:
        raise InputError(
            f"decomposition={decomposition!r} and matchings were both given: leave one out."
        )
    if decomposition not in chosen.decompositions:
        raise InputError(
            f"the {chosen.name} strategy does not split links into {decomposition}: leave "
            "decomposition out, or use matcha."
        )
    return decomposition


def _own_probabilities(chosen: Strategy, given: Any) -> tuple[float, ...] | None:
    if given is None:
        return None
    if not chosen.takes_probabilities:
        raise InputError(
            f"the {chosen.name} strategy draws nothing: probabilities go with matcha and single."
        )
    try:
        return tuple(float(p) for p in given)
    except (TypeError, ValueError):
        raise InputError("probabilities are a list of numbers, one a matching.") from None


def _own_matchings(topology: Topology, given: Any) -> tuple[Matching, ...]:
    """The user's decomposition with sorted pairs, verified against the topology."""
    matchings = _pairs(given)
    check_decomposition(topology, matchings)
    return matchings


def _own_rounds(topology: Topology, given: Any, *, push: bool) -> tuple[tuple[Matching, ...], ...]:
    """The user's rounds with sorted pairs (messages, for push), verified against the topology."""
    try:
        rounds = tuple(_pairs(round_, push=push) for round_ in given)
    except TypeError:
        raise PlanError("rounds are lists of matchings, [[[(i, j), …], …], …].") from None
    matchings = tuple(matching for round_ in rounds for matching in round_)
    check_matchings(topology, matchings, push=push)
    return rounds


def _pairs(given: Any, *, push: bool = False) -> tuple[Matching, ...]:
    try:
        pairs = [[(int(i), int(j)) for i, j in matching] for matching in given]
        if not push:
            pairs = [[(min(pair), max(pair)) for pair in matching] for matching in pairs]
        return tuple(tuple(sorted(matching)) for matching in pairs)
    except (TypeError, ValueError):
        raise PlanError(
            "matchings are lists of pairs of worker numbers, [[(i, j), …], …]."
        ) from None
