"""Staged plans made: several budgets for one topology, in force one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matcha.errors import InputError
from matcha.plans import Stage, StagedPlan
from matcha.strategies.planning import plan as make_plan
from matcha.topology import Topology


def staged_plan(
    topology: Topology,
    budgets: dict[int, float] | Sequence[float],
    strategy: str = "greedy",
    seed: int = 0,
    *,
    target: float | None = None,
    **options: Any,
) -> StagedPlan:
    """Plan several stages: budgets by their first iteration, or levels to choose from on demand.

    Args:
        topology: The workers and their links.
        budgets: `{0: 0.5, 1000: 0.1}` for stages fixed beforehand; or budgets alone, with a
            target, for stages on demand, which begin at the poorest level.
        strategy: As for `matcha.plan`.
        seed: As for `matcha.plan`.
        target: The consensus distance to hold on demand.
        options: Passed on to `matcha.plan`.

    Raises:
        InputError: Budgets alone without a target, or the other way round.
    """
    if isinstance(budgets, dict) == (target is not None):
        raise InputError(
            "stages are given by iteration, {0: 0.5, 1000: 0.1}, or as budgets with a target."
        )
    wanted = sorted(set(budgets.values() if isinstance(budgets, dict) else budgets))
    levels = tuple(make_plan(topology, budget, strategy, seed, **options) for budget in wanted)
    if isinstance(budgets, dict):
        stages = tuple(
            Stage(start=start, level=wanted.index(budgets[start])) for start in sorted(budgets)
        )
    else:
        stages = (Stage(start=0, level=0),)
    return StagedPlan(levels=levels, stages=stages, target=target)
