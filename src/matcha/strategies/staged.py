"""Staged plans made: several budgets one after another, or a next stage for links as they are."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping
from typing import Any

from matcha.errors import InputError
from matcha.plans import Plan, PlanLike, Stage, StagedPlan
from matcha.strategies.planning import plan as make_plan
from matcha.strategies.registry import STRATEGIES, strategy_with
from matcha.strategies.strategy import Builder, Strategy
from matcha.topology import Link
from matcha.topology.families import TopologyLike, as_topology

_OFF = 1.5
"""A link's time that is so many times another says that a plan made for the other is off."""


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
    levels = tuple(make_plan(topology, budget, strategy, seed, **options) for budget in wanted)
    stages = tuple(
        Stage(start=start, level=wanted.index(budgets[start])) for start in sorted(budgets)
    )
    return StagedPlan(levels=levels, stages=stages)


def check_followable(plan: PlanLike) -> None:
    """Refuse plans of which no next stage can be made."""
    if isinstance(plan, StagedPlan):
        raise InputError("this plan has stages of its own: a plan that follows starts with one.")
    strategy = STRATEGIES.get(plan.strategy)
    if strategy is None or not strategy.has_budget or strategy.needs_rounds:
        able = [s.name for s in STRATEGIES.values() if s.has_budget and not s.needs_rounds]
        raise InputError(
            f"a {plan.strategy} plan cannot follow the network, as nothing in it depends on how "
            f"long links take: use {', '.join(able)}."
        )
    if plan.topology.directed or any(level.mixing == "push" for level in plan.levels):
        raise InputError("links that carry one way are not timed: plans on them cannot follow.")


def is_off(plan: Plan, seconds: Mapping[Link, float], *, least: float = 0.0) -> bool:
    """Whether a link takes half as long again as the plan was made for, or less by as much.

    Only how links compare counts: a network that is slower as a whole asks for the same plan.

    Args:
        plan: The plan in force.
        seconds: What a meeting over each link takes now.
        least: Seconds per iteration by which a link must be off, as often as it is used (or, where
            it is hardly used, as a typical one is), so that small differences do not count.
    """
    planned, pace, uses = _planned_times(plan), _pace(plan, seconds), _uses(plan)
    typical = statistics.fmean(uses.values())
    for link, now in seconds.items():
        then = pace * planned[link]
        weighs = max(uses[link], typical) * abs(now - then)
        if (now > _OFF * then or then > _OFF * now) and weighs >= least:
            return True
    return False


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
    planned, pace = _planned_times(first), _pace(first, seconds)
    share = first.wire.size_ratio()
    times = [seconds.get(link, pace * planned[link]) for link in first.topology.links]
    topology = first.topology.with_link_times([t / share for t in times])
    whole = make_plan(topology, 1.0, "vanilla").expected_comm_time
    budget = min(1.0, first.expected_comm_time * pace / whole)
    strategy = strategy_with(first.strategy, mixing=first.mixing)
    return make_plan(topology, budget, strategy, first.seed, wire=first.wire)


def answer() -> None:
    """In a process of its own: a plan and times as JSON in, its `next_level` as JSON out."""
    plan, links = json.load(sys.stdin)
    seconds = {(i, j): s for i, j, s in links}
    json.dump(next_level(Plan.from_json(plan), seconds).to_json(), sys.stdout)


def _planned_times(plan: Plan) -> dict[Link, float]:
    """What the plan was made for: each link's time, in its own unit."""
    return {link: plan.timing.matching_time((link,)) for link in plan.topology.links}


def _uses(plan: Plan) -> dict[Link, float]:
    """How often each link is used per iteration."""
    found = dict.fromkeys(plan.topology.links, 0.0)
    for matching, uses in zip(plan.matchings, plan.schedule.uses, strict=True):
        for link in matching:
            found[link] += uses
    return found


def _pace(plan: Plan, seconds: Mapping[Link, float]) -> float:
    """Seconds of what the plan calls a unit, by a typical link."""
    planned = _planned_times(plan)
    return statistics.median(now / planned[link] for link, now in seconds.items())
