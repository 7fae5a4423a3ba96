"""Plans of either kind: what they have in common, and how they are read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from matcha.plans.plan import Plan, read_plan
from matcha.plans.staged import READABLE, StagedPlan
from matcha.rounds import Round
from matcha.timing import Timing
from matcha.topology import Matching, Topology
from matcha.wires import Wire


class PlanLike(Protocol):
    """A plan, or several in stages: all that engines, records and reports ask of one."""

    @property
    def topology(self) -> Topology: ...  # noqa: D102
    @property
    def num_workers(self) -> int: ...  # noqa: D102
    @property
    def strategy(self) -> str: ...  # noqa: D102
    @property
    def budget(self) -> float: ...  # noqa: D102
    @property
    def seed(self) -> int: ...  # noqa: D102
    @property
    def timing(self) -> Timing: ...  # noqa: D102
    @property
    def wire(self) -> Wire: ...  # noqa: D102
    @property
    def matchings(self) -> tuple[Matching, ...]: ...  # noqa: D102
    @property
    def notes(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def digest(self) -> str: ...  # noqa: D102
    @property
    def levels(self) -> tuple[Plan, ...]: ...  # noqa: D102
    def level_at(self, k: int) -> Plan: ...  # noqa: D102
    def round(self, k: int) -> Round: ...  # noqa: D102
    def rounds(self, start: int = 0, stop: int | None = None) -> Iterator[Round]: ...  # noqa: D102
    def round_time(self, round: Round) -> float: ...  # noqa: D102
    def summary(self) -> str: ...  # noqa: D102
    def to_json(self) -> dict[str, Any]: ...  # noqa: D102
    def save(self, path: str | Path) -> None: ...  # noqa: D102


def load_plan(path: str | Path) -> Plan | StagedPlan:
    """Read a plan of either kind, from a file that `save` wrote.

    Raises:
        PlanError: The file is missing, foreign, truncated or damaged.
    """
    return read_plan(path, _from_json)


def _from_json(document: dict[str, Any]) -> Plan | StagedPlan:
    kind = StagedPlan if document.get("schema") in READABLE else Plan
    return kind.from_json(document)
