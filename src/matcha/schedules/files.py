"""Schedules in saved plans."""

from __future__ import annotations

from typing import Any

from matcha.errors import PlanError
from matcha.schedules.drawn import Bernoulli, Choice
from matcha.schedules.repeated import Cycle, Periodic
from matcha.schedules.schedule import Schedule


def schedule_from_json(document: Any, probabilities: tuple[float, ...], seed: int) -> Schedule:
    """The schedule in a saved plan.

    Args:
        document: What `to_json` wrote.
        probabilities: Those that stand beside it; of rounds that repeat only their number counts.
        seed: The one that stands beside it.

    Raises:
        PlanError: The document does not describe a schedule for these matchings.
    """
    kind, count = document.get("kind") if isinstance(document, dict) else None, len(probabilities)
    if kind == "bernoulli":
        groups = tuple(tuple(group) for group in document["groups"])
        return Bernoulli(probabilities=probabilities, seed=seed, groups=groups)
    if kind == "choice":
        return Choice(probabilities=probabilities, seed=seed)
    if kind == "periodic":
        return Periodic(frequency=document["frequency"], num_matchings=count, seed=seed)
    if kind == "cycle":
        cycle = tuple(tuple(active) for active in document["cycle"])
        return Cycle(cycle=cycle, num_matchings=count, seed=seed)
    raise PlanError(f"its schedule kind {kind!r} is unknown.")
