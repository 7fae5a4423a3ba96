"""Staged plans: more or less communication as training goes on, still agreed by all workers.

A staged plan is a few plans (levels) and the iterations at which one takes over from another. The
stages are either a schedule fixed beforehand, or extended on demand: at a checkpoint all workers
feed the same measured consensus distance to `next_stage` and so make the same longer plan.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from matcha.documents import fingerprint
from matcha.errors import InputError, PlanError
from matcha.plans.plan import Plan, read_plan
from matcha.plans.protocol import Members
from matcha.rounds import Round
from matcha.timing import Timing
from matcha.topology import Link, Matching, Topology
from matcha.wires import Wire

SCHEMA = "matcha.staged-plan/2"
READABLE = (SCHEMA, "matcha.staged-plan/1")
_KNOWN_ROUNDS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """From iteration `start` on, until the next stage, `level` decides the rounds."""

    start: int
    level: int
    """Position in `StagedPlan.levels`."""


@dataclass(frozen=True, kw_only=True)
class StagedPlan(Members):
    """Several plans for one topology, each in force for a stretch of iterations.

    What a plan promises is said of each of its `levels`, not of them together.

    >>> import matcha
    >>> budgets = {0: 0.5, 100: 0.25}
    >>> staged = matcha.staged_plan(matcha.families.ring(4), budgets, strategy="periodic")
    >>> [len(staged.round(k).matchings) for k in (1, 99, 101, 103)]
    [2, 2, 0, 2]
    """

    levels: tuple[Plan, ...]
    stages: tuple[Stage, ...]
    target: float | None = None
    """The consensus distance to hold on demand; None: the stages are fixed."""

    def __post_init__(self) -> None:
        if not self.levels or not self.stages:
            raise PlanError("a staged plan needs a level and a stage.")
        if any(level.topology != self.topology for level in self.levels):
            raise PlanError("the levels of a staged plan share one topology.")
        if any(level.timing != self.timing for level in self.levels):
            raise PlanError("the levels of a staged plan share one delay model.")
        starts = [stage.start for stage in self.stages]
        if starts[0] != 0 or any(b <= a for a, b in itertools.pairwise(starts)):
            raise PlanError(f"stages start at 0 and go up, but they start at {starts}.")
        for stage in self.stages:
            if not 0 <= stage.level < len(self.levels):
                raise PlanError(f"stage level {stage.level} is not among the plan's levels.")
        if self.target is not None and not self.target > 0:
            raise PlanError(f"the target distance is {self.target!r}, but it must be positive.")

    # -- the members of a plan ------------------------------------------------------------------

    @property
    def topology(self) -> Topology:
        """The workers and their links."""
        return self.levels[0].topology

    @property
    def timing(self) -> Timing:
        """The delay model."""
        return self.levels[0].timing

    @property
    def wire(self) -> Wire:
        """What messages hold, in every stage."""
        return self.levels[0].wire

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
        """What a user should know about the levels, and about stages still to come."""
        notes = [
            f"level {n}: {note}" for n, level in enumerate(self.levels) for note in level.notes
        ]
        if self.target is not None:
            budgets = ", ".join(f"{level.budget:g}" for level in self.levels)
            notes.append(
                f"to hold a consensus distance of {self.target:g}, next_stage chooses among "
                f"budgets {budgets}; a run that never calls it stays in the last stage given."
            )
        return tuple(notes)

    @cached_property
    def matchings(self) -> tuple[Matching, ...]:
        """The matchings of all levels, one level after another."""
        return tuple(matching for level in self.levels for matching in level.matchings)

    def level_at(self, k: int) -> Plan:
        """The plan in force at iteration k."""
        return self.levels[self.stages[self._stage_at(k)].level]

    def _round(self, k: int) -> Round:
        stage = self.stages[self._stage_at(k)]
        return self._numbered(self.levels[stage.level].round(k - stage.start), stage.level)

    def _rounds(self, start: int, stop: int | None) -> Iterator[Round]:
        k = start
        while stop is None or k < stop:
            place = self._stage_at(k)
            stage = self.stages[place]
            last = self.stages[place + 1].start if place + 1 < len(self.stages) else stop
            end = stop if last is None else last if stop is None else min(last, stop)
            level = self.levels[stage.level]
            for round_ in level.rounds(k - stage.start, None if end is None else end - stage.start):
                yield self._numbered(round_, stage.level)
                k += 1

    def without(self, workers: Iterable[int]) -> StagedPlan:
        """The plan of those who are left, as `Plan.without`, in every stage."""
        gone = tuple(workers)
        return replace(self, levels=tuple(level.without(gone) for level in self.levels))

    def without_links(self, links: Iterable[Link]) -> StagedPlan:
        """The plan with some links cut, as `Plan.without_links`, in every stage."""
        cut = tuple(links)
        return replace(self, levels=tuple(level.without_links(cut) for level in self.levels))

    @cached_property
    def digest(self) -> str:
        """A fingerprint of everything that workers must agree on."""
        parts = {
            "levels": [level.digest for level in self.levels],
            "stages": [[stage.start, stage.level] for stage in self.stages],
            "target": self.target,
        }
        return fingerprint(parts)

    # -- on demand ------------------------------------------------------------------------------

    def next_stage(self, iteration: int, measured_consensus: float) -> StagedPlan:
        """The plan from a checkpoint on, given the consensus distance that all workers measured.

        Above the target the next richer level takes over, below a quarter of it the next poorer
        one; levels are ordered by their budgets. A pure function: workers that feed it the same
        numbers (agree on them first, as by an all-reduce) hold the same plan, with one digest.

        Args:
            iteration: The checkpoint: the first iteration that the decision is for.
            measured_consensus: (1/m) Σ ‖x_i − x̄‖² at the checkpoint.

        Raises:
            InputError: The plan has no target, or the checkpoint lies before its last stage.
        """
        if self.target is None:
            raise InputError("this staged plan has no target: its stages are fixed.")
        last = self.stages[-1]
        if iteration < last.start:
            raise InputError(
                f"iteration {iteration} lies before the last stage, which starts at {last.start}."
            )
        # Not a number means divergence: that asks for more communication, too.
        if not measured_consensus <= self.target:
            level = min(last.level + 1, len(self.levels) - 1)
        elif measured_consensus < self.target / 4:
            level = max(last.level - 1, 0)
        else:
            level = last.level
        if level == last.level:
            return self
        kept = tuple(stage for stage in self.stages if stage.start < iteration)
        return replace(self, stages=(*kept, Stage(start=iteration, level=level)))

    # -- in and out -----------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON values."""
        return {
            "schema": SCHEMA,
            "target": self.target,
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
        try:
            target = document["target"]
            return cls(
                levels=tuple(Plan.from_json(level) for level in document["levels"]),
                stages=tuple(
                    Stage(start=int(start), level=int(level)) for start, level in document["stages"]
                ),
                target=None if target is None else float(target),
            )
        except KeyError as error:
            raise PlanError(f"it lacks {error.args[0]!r}.") from None
        except (TypeError, ValueError) as error:
            raise PlanError(f"a part of it is malformed ({error}).") from None

    @classmethod
    def load(cls, path: str | Path) -> StagedPlan:
        """Read a staged plan that `save` wrote.

        Raises:
            PlanError: The file is missing, foreign, truncated or damaged.
        """
        return read_plan(path, cls.from_json)

    def summary(self) -> str:
        """The plan in a few lines of text."""
        lines = [f"staged {self.strategy} plan for {self.topology}"]
        if self.target is not None:
            lines[0] += f", holding a consensus distance of {self.target:g}"
        for stage in self.stages:
            level = self.levels[stage.level]
            error = "" if level.consensus_error is None else f", error {level.consensus_error:.4g}"
            lines.append(
                f"  from iteration {stage.start}: budget {level.budget:g}, "
                f"{level.expected_comm_time:.4g} {self.timing.unit} an iteration, "
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
    def _numbered(self) -> Callable[[Round, int], Round]:
        """Makes a level's round one whose indices are counted over the matchings of all levels."""
        counts = (len(level.matchings) for level in self.levels)
        offsets = tuple(itertools.accumulate(counts, initial=0))

        @lru_cache(maxsize=_KNOWN_ROUNDS)
        def numbered(round_: Round, level: int) -> Round:
            return replace(round_, indices=tuple(offsets[level] + j for j in round_.indices))

        return numbered
