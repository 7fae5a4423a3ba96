"""Staged plans: more or less communication as training goes on, still agreed by all workers.

A staged plan is a few plans (levels) and the iterations at which one takes over from another. The
stages are a schedule fixed beforehand, or are added while training goes on: all workers make the
next one from the same measured link times (`matcha.strategies.next_stage`).
"""

from __future__ import annotations

import itertools
import operator
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from matcha._io import explain_malformed, fingerprint, load_document
from matcha.errors import PlanError
from matcha.plans.plan import AnyPlan, OuterStep, Plan
from matcha.rounds import Round
from matcha.schedules import check_iteration
from matcha.timing import Timing
from matcha.topology import Link, Matching, Topology
from matcha.wires import Wire

SCHEMA = "matcha.staged-plan/2"
READABLE = (SCHEMA, "matcha.staged-plan/1")
MOST_STAGES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A part of training: `level` decides the rounds from iteration `start` to the next stage."""

    start: int
    level: int
    """Position in `StagedPlan.levels`."""


@dataclass(frozen=True, kw_only=True)
class StagedPlan(AnyPlan):
    """Several plans for one topology, each in force for a stretch of iterations.

    What a plan promises is said of each of its `levels`, not of them together. Communication is
    counted by the first level's delay model, so that a run has one unit.

    >>> import matcha
    >>> budgets = {0: 0.5, 100: 0.25}
    >>> staged = matcha.staged_plan(matcha.families.ring(4), budgets, strategy="periodic")
    >>> [len(staged.round(k).matchings) for k in (1, 99, 101, 103)]
    [2, 2, 0, 2]
    """

    levels: tuple[Plan, ...]
    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        if not self.levels or not self.stages:
            raise PlanError("a staged plan needs a level and a stage.")
        shared = {"wire": "wire", "worker_weights": "list of worker_weights", "outer": "outer step"}
        for name, noun in shared.items():
            if any(getattr(level, name) != getattr(self, name) for level in self.levels):
                raise PlanError(f"the levels of a staged plan share one {noun}.")
        if len(self.levels) > 1 and any(level.mixing == "relay" for level in self.levels):
            raise PlanError("relayed sums (relaysum) go on from round to round: use one plan.")
        whole = self.topology
        for level in self.levels:
            theirs = level.topology
            if theirs.directed != whole.directed or not set(theirs.links) <= set(whole.links):
                raise PlanError("the levels of a staged plan share one topology, which may grow.")
        starts = [stage.start for stage in self.stages]
        if starts[0] != 0 or any(b <= a for a, b in itertools.pairwise(starts)):
            raise PlanError(f"stages start at 0 and go up, but they start at {starts}.")
        for stage in self.stages:
            if not 0 <= stage.level < len(self.levels):
                raise PlanError(f"stage level {stage.level} is not among the plan's levels.")

    # -- the members of a plan ------------------------------------------------------------------

    @property
    def topology(self) -> Topology:
        """The workers and links of all stages; workers that join add theirs."""
        return max((level.topology for level in self.levels), key=lambda each: len(each.links))

    @property
    def timing(self) -> Timing:  # type: ignore[override]
        return self.levels[0].timing

    @property
    def wire(self) -> Wire:
        """What messages hold, in every stage."""
        return self.levels[0].wire

    @property
    def outer(self) -> OuterStep | None:
        """What follows each round, in every stage."""
        return self.levels[0].outer

    @property
    def worker_weights(self) -> tuple[float, ...] | None:
        """How much each worker counts, in every stage."""
        return self.levels[0].worker_weights

    @property
    def strategy(self) -> str:
        """The levels' strategy; `staged` where they differ."""
        names = {level.strategy for level in self.levels}
        return names.pop() if len(names) == 1 else "staged"

    @property
    def budget(self) -> float:
        """The largest budget of a stage."""
        return max(self.levels[stage.level].budget for stage in self.stages)

    @property
    def seed(self) -> int:
        """The first level's seed."""
        return self.levels[0].seed

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know about the levels, in the order in which they are first used."""
        first = {stage.level: stage.start for stage in reversed(self.stages)}
        return tuple(
            f"from iteration {start:,}: {note}"
            for n, start in sorted(first.items(), key=lambda level: level[1])
            for note in self.levels[n].notes
        )

    @cached_property
    def matchings(self) -> tuple[Matching, ...]:
        """The matchings of all levels, one level after another."""
        return tuple(matching for level in self.levels for matching in level.matchings)

    def level_at(self, k: int) -> Plan:
        """The plan in force at iteration k."""
        return self.levels[self.stages[self._stage_at(k)].level]

    def steps_before(self, k: int) -> int:
        """How many steps all workers together take before iteration k."""
        ends = (*self._starts[1:], k)
        return sum(
            (min(end, k) - stage.start) * len(self.levels[stage.level].members)
            for stage, end in zip(self.stages, ends, strict=True)
            if stage.start < k
        )

    def round(self, k: int) -> Round:
        check_iteration(k)
        stage = self.stages[self._stage_at(k)]
        return self._number(self.levels[stage.level].round(k - stage.start), stage.level)

    def rounds(self, start: int = 0, stop: int | None = None) -> Iterator[Round]:
        check_iteration(start)
        return self._rounds(start, stop)

    def _rounds(self, k: int, stop: int | None) -> Iterator[Round]:
        while stop is None or k < stop:
            place = self._stage_at(k)
            stage = self.stages[place]
            ends = [end for end in (*self._starts[place + 1 : place + 2], stop) if end is not None]
            last = min(ends) - stage.start if ends else None
            for round_ in self.levels[stage.level].rounds(k - stage.start, last):
                yield self._number(round_, stage.level)
                k += 1

    def without(self, workers: Iterable[int]) -> StagedPlan:
        """The plan of the workers that are left, as `Plan.without`, in every stage."""
        gone = tuple(workers)
        return replace(self, levels=tuple(level.without(gone) for level in self.levels))

    def without_links(self, links: Iterable[Link]) -> StagedPlan:
        """The plan with some links cut, as `Plan.without_links`, in every stage."""
        cut = tuple(links)
        return replace(self, levels=tuple(level.without_links(cut) for level in self.levels))

    @cached_property
    def digest(self) -> str:
        parts = {
            "levels": [level.digest for level in self.levels],
            "stages": [[stage.start, stage.level] for stage in self.stages],
            "target": None,  # version 1 of these files had one
        }
        return fingerprint(parts)

    # -- as training goes on ----------------------------------------------------------------------

    def with_stage(self, start: int, level: Plan) -> StagedPlan:
        """The plan with one more stage; of a great many, one between the first and the last goes.

        What is past is not trained again, so nothing depends on it but who took how many steps; the
        first stage says what was asked for.

        Raises:
            PlanError: The stage would begin before the last one does.
        """
        stages = (*self.stages, Stage(start=start, level=len(self.levels)))
        longer = replace(self, levels=(*self.levels, level), stages=stages)
        return longer if len(stages) <= MOST_STAGES else longer._without_second()

    def _without_second(self) -> StagedPlan:
        members = [self.levels[stage.level].members for stage in self.stages[:-1]]
        place = next((n for n in range(1, len(members)) if members[n] == members[n - 1]), None)
        if place is None:
            return self
        kept = (*self.stages[:place], *self.stages[place + 1 :])
        used = sorted({stage.level for stage in kept})
        return replace(
            self,
            levels=tuple(self.levels[n] for n in used),
            stages=tuple(Stage(start=s.start, level=used.index(s.level)) for s in kept),
        )

    # -- in and out -----------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "stages": [[stage.start, stage.level] for stage in self.stages],
            "levels": [level.to_json() for level in self.levels],
        }

    @classmethod
    def from_json(cls, document: Any) -> StagedPlan:
        """The staged plan in a JSON document, validated.

        Raises:
            PlanError: The document is not a staged plan, or a part of it is not valid.
        """
        if not isinstance(document, dict) or document.get("schema") not in READABLE:
            raise PlanError("it is not a staged matcha plan of this version.")
        with explain_malformed(PlanError):
            return cls(
                levels=tuple(Plan.from_json(level) for level in document["levels"]),
                stages=tuple(
                    Stage(start=operator.index(start), level=operator.index(level))
                    for start, level in document["stages"]
                ),
            )

    def summary(self) -> str:
        lines = [f"staged {self.strategy} plan for {self.topology}"]
        for stage in self.stages:
            level = self.levels[stage.level]
            error = "" if level.consensus_error is None else f", error {level.consensus_error:.4g}"
            lines.append(
                f"  from iteration {stage.start}: budget {level.budget:g}, "
                f"{level.expected_comm_time:.4g} {level.timing.unit} per iteration, "
                f"rho {level.rho:.4f}{error}"
            )
        return "\n".join(lines)

    # -- helpers --------------------------------------------------------------------------------

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return tuple(stage.start for stage in self.stages)

    def _stage_at(self, k: int) -> int:
        return bisect_right(self._starts, k) - 1

    @cached_property
    def _offsets(self) -> tuple[int, ...]:
        counts = (len(level.matchings) for level in self.levels)
        return tuple(itertools.accumulate(counts, initial=0))

    def _number(self, round_: Round, level: int) -> Round:
        """A level's round with its indices counted over the matchings of all levels."""
        indices = tuple(self._offsets[level] + j for j in round_.indices)
        return replace(round_, indices=indices)


PlanLike: TypeAlias = Plan | StagedPlan
"""A plan, or several in stages: what engines, records and reports take."""


def check_plan(given: Any) -> PlanLike:
    """What was given as a plan, if it is one.

    Raises:
        PlanError: It is something else, such as the name of a plan's file.
    """
    if isinstance(given, AnyPlan):
        return given  # type: ignore[return-value]  # the two there are, or registered as one
    make = "matcha.load_plan" if str(given).endswith(".json") else "matcha.plan"
    raise PlanError(f"the plan is {given!r}, but it is a Plan: {make}({str(given)!r}) makes one.")


def load_plan(path: str | Path) -> PlanLike:
    """Read a plan of either kind, from a file that `save` wrote.

    Raises:
        PlanError: The file is missing, foreign, truncated or damaged.
    """
    return load_document(path, read_plan)


def read_plan(document: dict[str, Any]) -> PlanLike:
    """The plan of either kind in a JSON document."""
    staged = document.get("schema") in READABLE
    return StagedPlan.from_json(document) if staged else Plan.from_json(document)
