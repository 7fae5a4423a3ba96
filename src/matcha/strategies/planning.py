"""Planning: a topology, a budget and a strategy in, a plan out; or one of several stages."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from matcha._numerics import ProgressCallback
from matcha.errors import InputError
from matcha.matchings import check_decomposition
from matcha.mixing import link_weights
from matcha.plans import Events, Plan, PlanLike, Stage, StagedPlan, check_budget
from matcha.rounds import ONE_WAY, Mixing, check_separable
from matcha.schedules import check_seed
from matcha.strategies.greedy import Greedy
from matcha.strategies.matcha import Matcha
from matcha.strategies.registry import STRATEGIES, as_strategy, strategy_with
from matcha.strategies.strategy import Builder, Request, Strategy, sort_pairs
from matcha.timing import Timing, default_timing
from matcha.topology import Link, Topology, parts_of
from matcha.topology.families import TopologyLike, as_topology
from matcha.wires import Float, TopK, Wire, needs_meetings, parse_wire
from matcha.wires.wire import budget_over, timing_over

_OFF = 1.5
"""A link's time that is so many times another says that a plan made for the other is off."""


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
    if strategy is None:
        strategy = Greedy() if matchings is None else Matcha()
    chosen, own = as_strategy(strategy), None
    split = getattr(chosen, "decomposition", "matchings")
    if matchings is not None and split != "matchings":
        raise InputError(f"decomposition={split!r} and matchings were both given: leave one out.")
    message, whole = _own_wire(chosen, parse_wire(wire)), timing or default_timing(topology)
    mixing = _resolve_mixing(chosen, topology, message)
    asked = check_budget(budget)
    _check_wire(chosen, mixing, message)
    weights = _resolve_weights(chosen, mixing, topology)
    if matchings is not None:
        own = sort_pairs(matchings)
        check_decomposition(topology, own)
    request = Request(
        topology=topology,
        budget=budget_over(topology, whole, message, asked),
        strategy=chosen.label,
        seed=check_seed(seed),
        mixing=mixing,
        timing=timing_over(whole, message),
        matchings=own,
        alpha=getattr(chosen, "alpha", None),
        weights=weights,
        progress=progress,
    )
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
    """The strategy's own wire where it has one, or another of that kind."""
    told: str | Wire | None = getattr(chosen, "wire", None)
    if told is None:
        return wire
    own = parse_wire(told)
    if wire != Float() and type(wire) is not type(own):
        raise InputError(
            f"messages of {chosen.label} are {own.name}, not {wire.name}: leave the wire out, or "
            "use diloco or local."
        )
    return own if wire == Float() else wire


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


# -- in stages ------------------------------------------------------------------------------------


def staged_plan(
    topology: TopologyLike,
    budgets: Mapping[int, float],
    strategy: str | Strategy | Builder | None = None,
    seed: int = 0,
    **options: Any,
) -> StagedPlan:
    """Plan several stages: budgets by their first iteration.

    Args:
        topology: As for `matcha.plan`.
        budgets: By iteration, `{0: 0.5, 1000: 0.1}`.
        strategy: As for `matcha.plan`.
        seed: As for `matcha.plan`.
        options: Passed on to `matcha.plan`.

    Raises:
        InputError: The budgets are not given by iteration.
    """
    if not isinstance(budgets, Mapping):
        raise InputError("stages are budgets by iteration: {0: 0.5, 1000: 0.1}.")
    topology, wanted = as_topology(topology), sorted(set(budgets.values()))
    levels = tuple(plan(topology, budget, strategy, seed, **options) for budget in wanted)
    stages = tuple(
        Stage(start=start, level=wanted.index(budgets[start])) for start in sorted(budgets)
    )
    return StagedPlan(levels=levels, stages=stages)


def check_followable(plan: PlanLike) -> None:
    """Refuse plans of which no next stage can be made."""
    if isinstance(plan, StagedPlan):
        raise InputError("this plan has stages of its own: a plan that follows starts with one.")
    options = [s for s in STRATEGIES.values() if s.has_budget and not s.needs_rounds]
    able = [s.name for s in options if "relay" not in s.mixings]
    if plan.strategy not in able:
        raise InputError(
            f"a {plan.strategy} plan cannot follow the network, as nothing in it depends on how "
            f"long links take: use {', '.join(able)}."
        )
    if plan.topology.directed or plan.mixing == "push":
        raise InputError("links that carry one way are not timed: plans on them cannot follow.")


def is_off(plan: Plan, seconds: Mapping[Link, float], *, least: float = 0.0) -> bool:
    """Whether a link takes half as long again as the plan was made for, or less by as much.

    Only how links compare counts: a network that is slower as a whole asks for the same plan. By
    at least so many seconds per iteration must a link be off, as often as it is used (or, where
    it is hardly used, as a typical one is), so that small differences do not count.
    """
    (_, planned), uses = _at_pace(plan, seconds), plan.process.link_uses
    typical = statistics.fmean(uses.values())
    return any(
        max(now, planned[link]) > _OFF * min(now, planned[link])
        and max(uses[link], typical) * abs(now - planned[link]) >= least
        for link, now in seconds.items()
    )


def next_stage(plan: Plan | StagedPlan, seconds: Mapping[Link, float], start: int) -> StagedPlan:
    """The plan from an iteration on, for links that take other times than it was made for.

    What was asked for first stays: strategy, seed, and communication time per iteration. That time
    is the first plan's, in units of what a typical link takes: where one link becomes ten
    times slower, iterations do not, and the rest of the network does its work. A pure function:
    workers that give it the same times hold the same plan, with one digest.

    Args:
        plan: What was planned so far.
        seconds: What a meeting over each link takes now; a link without is taken to have changed
            as a typical one has.
        start: The first iteration of the stage.

    Raises:
        InputError: Of such a plan no next stage can be made.

    >>> import matcha
    >>> ring = matcha.families.ring(4)
    >>> plan = matcha.plan(ring, 0.5, "greedy")
    >>> slow = next_stage(plan, {(0, 1): 1.0, (0, 3): 0.1, (1, 2): 0.1, (2, 3): 0.1}, 100)
    >>> [sum((0, 1) in slow.round(k).links for k in range(s, s + 100)) for s in (0, 100)]
    [50, 0]
    """
    return in_stages(plan).with_stage(start, next_level(plan.levels[0], seconds))


def in_stages(plan: Plan | StagedPlan) -> StagedPlan:
    """The plan as one of stages, of which there may be only one."""
    if isinstance(plan, StagedPlan):
        return plan
    return StagedPlan(levels=(plan,), stages=(Stage(start=0, level=0),))


def next_level(first: Plan, seconds: Mapping[Link, float]) -> Plan:
    """The plan of `next_stage` by itself, from the plan that was asked for first."""
    check_followable(first)
    pace, planned = _at_pace(first, seconds)
    share = first.wire.size_ratio()
    times = [seconds.get(link, planned[link]) for link in first.topology.links]
    topology = first.topology.with_link_times([t / share for t in times])
    return _plan_again(first, topology, first.process.gone, pace)


def _at_pace(plan: Plan, seconds: Mapping[Link, float]) -> tuple[float, dict[Link, float]]:
    """Seconds of what the plan calls a unit, by a typical link; and what links then should take."""
    planned = {link: plan.timing.matching_time((link,)) for link in plan.topology.links}
    pace = statistics.median(now / planned[link] for link, now in seconds.items())
    return pace, {link: pace * time for link, time in planned.items()}


def check_growable(plan: PlanLike) -> None:
    """Refuse plans that cannot be made again for more or fewer workers."""
    for level in plan.levels:
        check_separable(level.mixing)
        if level.worker_weights is not None:
            raise InputError(
                "worker_weights are of the workers that the plan began with: plan without them "
                "where workers join or leave for good."
            )
        strategy = STRATEGIES.get(level.strategy)
        if strategy is None or strategy.needs_rounds or level.topology.directed:
            raise InputError(
                f"a {level.strategy} plan on {level.topology.name} cannot be made again for other "
                "workers: use greedy, matcha, vanilla or periodic, with links that carry both ways."
            )


def with_workers(
    plan: PlanLike,
    joined: Mapping[int, Iterable[int] | Mapping[int, float]],
    left: Iterable[int] = (),
) -> Plan:
    """Plan again when workers have joined or left for good; all others keep their numbers.

    What was asked for stays: strategy, seed, wire, and communication time per iteration. Where
    those that leave tear the others apart, links that join the parts are added. A pure function.

    Args:
        plan: In force so far; of a staged plan the last stage.
        joined: Each new worker's neighbors, with the seconds of an exchange where they are known.
            A number above all others may leave some out: those are workers that are not there.
        left: Workers that leave for good; `Plan.without` is for those that may come back.

    Raises:
        InputError: A worker that joins is there already, or its neighbor is not; a worker that
            leaves is not there; fewer than two workers are left; or the plan cannot be made again.

    >>> import matcha
    >>> plan = matcha.plan(matcha.families.ring(4), 0.5, "greedy")
    >>> grown = with_workers(plan, {4: [0, 2]}, left=[3])
    >>> grown.members, sorted({link for k in range(99) for link in grown.round(k).links})
    ((0, 1, 2, 4), [(0, 1), (0, 4), (1, 2), (2, 4)])
    """
    check_growable(plan)
    base = plan.levels[plan.stages[-1].level] if isinstance(plan, StagedPlan) else plan
    members, leaving = set(base.members), set(left)
    for worker in sorted(leaving - members):
        raise InputError(f"worker {worker} cannot leave: it is not there.")
    for worker in sorted(members & joined.keys()):
        raise InputError(f"worker {worker} cannot join: it is there already.")
    there = (members - leaving) | joined.keys()
    seconds: dict[Link, float | None] = {}
    for worker, links in joined.items():
        known = links if isinstance(links, Mapping) else dict.fromkeys(links)
        if not there.intersection(known) - {worker}:
            raise InputError(f"worker {worker} cannot join: it needs a link to a worker there.")
        for peer, time in known.items():
            if peer not in there or peer == worker:
                raise InputError(f"worker {worker} cannot join with a link to worker {peer}.")
            seconds[min(worker, peer), max(worker, peer)] = time
    topology = _extend(plan.topology, seconds, there)
    return _plan_again(base, topology, frozenset(range(topology.num_workers)) - there)


def with_events(plan: PlanLike, events: Events) -> PlanLike:
    """The plan with a stage for each iteration at which workers join or leave for good.

    Stages that the plan has already, as one that real workers made does, stay as they are.
    """
    moments = {join.at for join in events.joins} | {leave.at for leave in events.leaves}
    for at in sorted(moments):
        joined = {join.worker: join.links for join in events.joins if join.at == at}
        left = {leave.worker for leave in events.leaves if leave.at == at}
        there = set(plan.level_at(at).members)
        if joined.keys() <= there and left.isdisjoint(there):
            continue
        plan = in_stages(plan).with_stage(at, with_workers(plan, joined, left))
    return plan


def _extend(topology: Topology, joined: Mapping[Link, float | None], there: set[int]) -> Topology:
    """The topology with further links, and those that join what would fall apart."""
    old = topology.link_times or [None] * len(topology.links)
    times = dict(zip(topology.links, old, strict=True)) | dict(joined)
    number = 1 + max(topology.num_workers - 1, *there)
    part = parts_of([link for link in times if there.issuperset(link)], number)
    lowest = {part[worker]: worker for worker in sorted(there, reverse=True)}
    for link in itertools.pairwise(sorted(lowest.values())):
        times.setdefault(link, None)
    linked = {worker for link in times for worker in link}
    for worker in set(range(number)) - linked:  # a number that was left out has a link to nowhere
        times[min(there - {worker}), worker] = None
    seconds = None
    if topology.link_times is not None:
        usual = statistics.median(time for time in times.values() if time is not None)
        seconds = {link: time or usual for link, time in times.items()}
    return Topology.from_links(times, number, link_times=seconds, name=topology.name)


def _plan_again(first: Plan, topology: Topology, gone: frozenset[int], pace: float = 1.0) -> Plan:
    """What was asked for, on other links or with other times, for the workers that are there."""
    there = [worker for worker in range(topology.num_workers) if worker not in gone]
    if len(there) < 2:
        raise InputError("a plan is for at least two workers, but fewer would be left.")
    near = topology
    if gone:
        place, times = {worker: n for n, worker in enumerate(there)}, topology.link_times
        kept = [n for n, link in enumerate(topology.links) if gone.isdisjoint(link)]
        near = Topology.from_links(
            [(place[i], place[j]) for i, j in (topology.links[n] for n in kept)],
            len(there),
            link_times=None if times is None else [times[n] for n in kept],
            name=topology.name,
        )
    whole = plan(near, 1.0, "vanilla").expected_comm_time
    budget = min(1.0, first.expected_comm_time * pace / whole)
    strategy = strategy_with(first.strategy, mixing=first.mixing)
    made = plan(near, budget, strategy, first.seed, wire=first.wire)
    made = replace(made, outer=first.outer)
    if not gone:
        return made
    numbered = tuple(tuple((there[i], there[j]) for i, j in m) for m in made.matchings)
    process = replace(made.process, topology=topology, matchings=numbered, gone=gone)
    timing = timing_over(default_timing(topology), first.wire)
    return replace(made, process=process.remember(**made.process.figures), timing=timing)


def answer() -> None:
    """In a process of its own: a plan and times as JSON in, its `next_level` as JSON out."""
    plan, links = json.load(sys.stdin)
    seconds = {(i, j): s for i, j, s in links}
    json.dump(next_level(Plan.from_json(plan), seconds).to_json(), sys.stdout)
