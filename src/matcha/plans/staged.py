"""Staged plans: more or less communication as training goes on, still agreed by all workers.

A staged plan is a few plans (levels) and the iterations at which one takes over from another. The
stages are either a schedule fixed beforehand, or extended on demand: at a checkpoint all workers
feed the same measured consensus distance to `next_stage` and so make the same longer plan. Engines
see the members of a `Plan`.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from matcha.documents import fingerprint, save_document
from matcha.errors import InputError, PlanError
from matcha.plans.plan import Plan, read_plan
from matcha.rounds import Mixing, Round
from matcha.timing import Timing
from matcha.topology import Matching, Topology

SCHEMA = "matcha.staged-plan/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """From iteration `start` on, until the next stage, `level` decides the rounds."""

    start: int
    level: int
    """Position in `StagedPlan.levels`."""


@dataclass(frozen=True, kw_only=True)
class StagedPlan:
    """Several plans for one topology, each in force for a stretch of iterations.

    >>> from matcha.topology import families
    >>> staged = staged_plan(families.ring(4), {0: 0.5, 100: 0.25}, strategy="periodic")
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
    def num_workers(self) -> int:
        """How many workers the plan is for."""
        return self.topology.num_workers

    @property
    def num_colors(self) -> int:
        """M: what budgets are a fraction of."""
        return self.levels[0].num_colors

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
    def mixing(self) -> Mixing:
        """The mixing of the last stage; each round carries its own."""
        return self._last.mixing

    @property
    def alpha(self) -> float:
        """The weight of the last stage; each round carries its own."""
        return self._last.alpha

    @property
    def rho(self) -> float:
        """The slowest contraction of a stage."""
        return max(self.levels[stage.level].rho for stage in self.stages)

    @property
    def expected_comm_time(self) -> float:
        """Communication time an iteration in the last stage."""
        return self._last.expected_comm_time

    @property
    def consensus_error(self) -> float | None:
        """Steady-state consensus error of the last stage."""
        return self._last.consensus_error

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

    def round(self, k: int) -> Round:
        """What is active at iteration k; a stage begins its own schedule at its start."""
        if k < 0:
            raise InputError(f"iterations count from 0, but round {k} was asked for.")
        stage = self.stages[self._stage_at(k)]
        return self._numbered(self.levels[stage.level].round(k - stage.start), stage.level)

    def rounds(self, start: int = 0, stop: int | None = None) -> Iterator[Round]:
        """The rounds of iterations start, start + 1, … in order."""
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

    def round_time(self, round: Round) -> float:
        """The communication time of a round, in the delay model's unit."""
        return self.timing.round_time(round.matchings)

    def mixing_matrix(self, k: int) -> npt.NDArray[np.float64]:
        """W(k) as a dense matrix, for small m."""
        return self.round(k).matrix(self.num_workers)

    @property
    def smallest_self_weight(self) -> float:
        """The least weight that a worker ever gives its own value in one round."""
        return min(self.levels[stage.level].smallest_self_weight for stage in self.stages)

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
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise PlanError("it is not a staged matcha plan.")
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

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, with a checksum, whole or not at all."""
        save_document(self.to_json(), Path(path))

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

    def __str__(self) -> str:
        return self.summary()

    # -- helpers --------------------------------------------------------------------------------

    @property
    def _last(self) -> Plan:
        return self.levels[self.stages[-1].level]

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return tuple(stage.start for stage in self.stages)

    def _stage_at(self, k: int) -> int:
        return bisect_right(self._starts, k) - 1

    @cached_property
    def _known(self) -> dict[tuple[int, tuple[int, ...]], Round]:
        return {}

    def _numbered(self, round_: Round, level: int) -> Round:
        """The round with its indices counted over the matchings of all levels."""
        key = (level, round_.indices)
        found = self._known.get(key)
        if found is None:
            offset = sum(len(other.matchings) for other in self.levels[:level])
            found = replace(round_, indices=tuple(offset + j for j in round_.indices))
            if len(self._known) < 1 << 16:
                self._known[key] = found
        return found


AnyPlan: TypeAlias = Plan | StagedPlan
"""What engines, records and reports take: a plan, or several in stages."""


def levels(plan: AnyPlan) -> tuple[Plan, ...]:
    """The plans that decide a plan's rounds: the levels of a staged one, or it alone."""
    return plan.levels if isinstance(plan, StagedPlan) else (plan,)


def load_plan(path: str | Path) -> AnyPlan:
    """Read a plan of either kind.

    Raises:
        PlanError: The file is missing, foreign, truncated or damaged.
    """
    return read_plan(path, _from_json)


def _from_json(document: dict[str, Any]) -> AnyPlan:
    kind = StagedPlan if document.get("schema") == SCHEMA else Plan
    return kind.from_json(document)
