"""Schedules in saved plans: by the name of their kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from matcha.documents import Kinds
from matcha.schedules.drawn import Bernoulli, Choice
from matcha.schedules.repeated import Cycle, Periodic
from matcha.schedules.schedule import Schedule

Reader: TypeAlias = Callable[[dict[str, Any], tuple[float, ...], int], Schedule]


def _bernoulli(document: dict[str, Any], probabilities: tuple[float, ...], seed: int) -> Schedule:
    groups = tuple(tuple(group) for group in document["groups"])
    return Bernoulli(probabilities=probabilities, seed=seed, groups=groups)


def _choice(_: dict[str, Any], probabilities: tuple[float, ...], seed: int) -> Schedule:
    return Choice(probabilities=probabilities, seed=seed)


def _periodic(document: dict[str, Any], probabilities: tuple[float, ...], seed: int) -> Schedule:
    return Periodic(frequency=document["frequency"], num_matchings=len(probabilities), seed=seed)


def _cycle(document: dict[str, Any], probabilities: tuple[float, ...], seed: int) -> Schedule:
    cycle = tuple(tuple(active) for active in document["cycle"])
    return Cycle(cycle=cycle, num_matchings=len(probabilities), seed=seed)


_KINDS: Kinds[Schedule] = Kinds(
    "schedule",
    "kind",
    "matcha.schedules.register_schedule",
    {"bernoulli": _bernoulli, "choice": _choice, "periodic": _periodic, "cycle": _cycle},
)


def register_schedule(kind: str, read: Reader) -> None:
    """Make plans with a schedule of your own savable.

    Its `to_json` says `{"kind": kind, ...}`; whoever loads such a plan registers it first.

    Args:
        kind: The name under which it is saved.
        read: Takes what `to_json` wrote, the plan's probabilities (one a matching) and its seed,
            and makes the schedule again.

    Raises:
        InputError: The name is taken by another schedule.
    """
    _KINDS.register(kind, read)


def schedule_to_json(schedule: Schedule) -> dict[str, Any]:
    """A schedule as plain JSON values, of which `schedule_from_json` makes it again.

    Raises:
        PlanError: Nobody could read it: its kind is not registered.
    """
    return _KINDS.to_json(schedule)


def schedule_from_json(document: Any, probabilities: tuple[float, ...], seed: int) -> Schedule:
    """The schedule in a saved plan.

    Args:
        document: What `to_json` wrote.
        probabilities: Those that stand beside it; of rounds that repeat only their number counts.
        seed: The one that stands beside it.

    Raises:
        PlanError: The document does not describe a schedule for these matchings that is known here.
    """
    return _KINDS.from_json(document, probabilities, seed)
