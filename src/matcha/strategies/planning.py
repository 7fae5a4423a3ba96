"""Planning: a topology, a budget and a strategy in, a plan out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from matcha._numerics import ProgressCallback
from matcha.errors import InputError
from matcha.matchings import check_decomposition
from matcha.mixing import link_weights
from matcha.plans import Plan, check_budget
from matcha.rounds import ONE_WAY, Mixing
from matcha.schedules import check_seed
from matcha.strategies.matcha import Matcha
from matcha.strategies.parts import sorted_pairs
from matcha.strategies.registry import STRATEGIES, Greedy, as_strategy
from matcha.strategies.strategy import Builder, Request, Strategy
from matcha.timing import Timing, default_timing
from matcha.topology import Link, Topology
from matcha.topology.families import TopologyLike, as_topology
from matcha.wires import Float, TopK, Wire, needs_meetings, parse_wire
from matcha.wires.delays import budget_over, timing_over


def plan(
    topology: TopologyLike,
    budget: float = 0.5,
    strategy: str | Strategy | Builder | None = None,
    seed: int = 0,
    *,
    matchings: Iterable[Iterable[Sequence[int]]] | None = None,
    timing: Timing | None = None,
    wire: str | Wire = "float32",
    worker_weights: Sequence[float] | None = None,
    progress: ProgressCallback | None = None,
) -> Plan:
    """Plan the communication of decentralized SGD on a topology within a budget.

    Args:
        topology: The workers and their links: a `Topology`, a name such as `"ring:8"`, a file, a
            networkx graph, or a list of links.
        budget: C_b in (0, 1]: expected communication time per iteration as a fraction of vanilla's.
        strategy: One of `matcha.strategies.STRATEGIES`, such as `Greedy(effort="high")`; its name
            alone, for a strategy without options; or your own function from a `Request` to a
            `Plan`, itself or as `module:function`. By default `greedy`, or `matcha` where you bring
            matchings.
        seed: Decides which rounds are drawn, and every search on the way.
        matchings: Your own decomposition of the links, as lists of pairs of worker numbers.
        timing: The delay model; by default link seconds where the topology has them, else units.
        wire: What messages hold: one of `matcha.wires.WIRES`, such as `modulo:3`. The budget keeps
            its meaning, a fraction of vanilla's time with whole float32 models, so smaller messages
            buy more rounds.
        worker_weights: How much each worker counts, such as how many examples it has: with SGD,
            training is towards their weighted average. By default all count alike.
        progress: Called with (done, total, what the steps are) while long searches run.

    Returns:
        The plan, with its contraction ρ, its expected communication time and its certificate.

    Raises:
        InputError: The budget, the strategy or the decomposition is not valid.

    >>> from matcha.topology import families
    >>> plan(families.ring(4), budget=1.0, strategy="vanilla").expected_comm_time
    2.0
    """
    topology = as_topology(topology)
    chosen = _resolve(strategy, has_matchings=matchings is not None)
    message, whole = parse_wire(wire), timing or default_timing(topology)
    message = _own_wire(chosen, message)
    mixing = _resolve_mixing(chosen, topology, message)
    asked = check_budget(budget)
    _check_wire(chosen, mixing, message)
    request = Request(
        topology=topology,
        budget=budget_over(topology, whole, message, asked),
        strategy=chosen.label,
        seed=check_seed(seed),
        mixing=mixing,
        timing=timing_over(whole, message),
        alpha=getattr(chosen, "alpha", None),
        weights=_resolve_weights(chosen, mixing, topology),
        progress=progress,
    )
    if matchings is not None:
        own = sorted_pairs(matchings)
        check_decomposition(topology, own)
        request = replace(request, matchings=own)
    made = chosen.build(request)
    if not isinstance(made, Plan):
        raise InputError(
            f"the strategy {chosen.label!r} returned {made!r}, which is not a Plan: return what "
            "matcha.plan makes."
        )
    if worker_weights is not None:
        made = replace(made, worker_weights=tuple(worker_weights))
    kept = asked if made.budget == request.budget else made.budget
    return made if message == Float() else replace(made, wire=message, budget=kept)


# -- what was given, checked ----------------------------------------------------------------------


def _resolve(strategy: str | Strategy | Builder | None, *, has_matchings: bool) -> Strategy:
    if strategy is None:
        return Matcha() if has_matchings else Greedy()
    chosen = as_strategy(strategy)
    decomposition = getattr(chosen, "decomposition", "matchings")
    if has_matchings and decomposition != "matchings":
        raise InputError(
            f"decomposition={decomposition!r} and matchings were both given: leave one out."
        )
    return chosen


def _resolve_mixing(chosen: Strategy, topology: Topology, wire: Wire) -> Mixing:
    """What the strategy was told to mix by, or its first choice for such links and messages."""
    told: Mixing | None = getattr(chosen, "mixing", None)
    if not topology.directed:
        paired = chosen.mixings[0] == "average" and "pairwise" in chosen.mixings
        return told or ("pairwise" if paired and needs_meetings(wire) else chosen.mixings[0])
    able = [some for some in chosen.mixings if some in ONE_WAY]
    if not able or told not in (None, *able):
        others = ", ".join(n for n, s in STRATEGIES.items() if set(ONE_WAY) & set(s.mixings))
        raise InputError(
            f"links of this topology carry one way, but {told or chosen.label} needs both: "
            f"use push mixing, with {others}."
        )
    return able[0]


def _own_wire(chosen: Strategy, wire: Wire) -> Wire:
    """The strategy's own wire where it has one."""
    own: str | Wire | None = getattr(chosen, "wire", None)
    if own is None:
        return wire
    if wire not in (Float(), parse_wire(own)):
        raise InputError(
            f"messages of {chosen.label} are {parse_wire(own).name}, not {wire.name}: leave the "
            "wire out, or use diloco or local."
        )
    return parse_wire(own)


def _check_wire(chosen: Strategy, mixing: Mixing, wire: Wire) -> None:
    if not isinstance(wire, Float) and mixing in ONE_WAY:
        raise InputError(
            f"messages that go one way take whole values, not the wire {wire.name!r}: use "
            "bfloat16 or leave the wire out."
        )
    if isinstance(wire, TopK):
        if mixing != "average":
            raise InputError(
                f"the wire {wire.name!r} is for exact averages, but {chosen.label} has {mixing} "
                "mixing here: use local or sparseloco, or another wire."
            )
    elif wire != Float() and mixing in ("average", "relay"):
        raise InputError(
            f"{chosen.label} adds up whole values, not what the wire {wire.name!r} holds: "
            "leave the wire out, or use greedy."
        )


def _resolve_weights(
    chosen: Strategy, mixing: Mixing, topology: Topology
) -> Mapping[Link, float] | None:
    weights: Any = getattr(chosen, "weights", None)
    if weights is None:
        return None
    if mixing != "laplacian":
        raise InputError(
            f"the {chosen.label} strategy mixes pair by pair here, but weights of links go with "
            "laplacian mixing: leave them out, or use matcha, vanilla or periodic."
        )
    return link_weights(weights, topology)
