"""The plan: which links talk, how often, with which weights. A value, saved as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from matcha._numerics.certificates import Certificate
from matcha.documents import fingerprint, load_document, save_document
from matcha.errors import InputError, PlanError
from matcha.rounds import Mixing, Round
from matcha.schedules import Bernoulli, Choice, Cycle, Periodic, schedule_from_json
from matcha.timing import Timing, timing_from_json
from matcha.topology import Matching, Topology, check_matchings

SCHEMA = "matcha.plan/1"
_P = TypeVar("_P")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A topology, a strategy, a budget, a seed, and everything derived from them.

    `plan.round(k)` says what happens at iteration k: the same on every worker, in any order of k.
    """

    topology: Topology
    strategy: str
    budget: float
    seed: int
    mixing: Mixing
    matchings: tuple[Matching, ...]
    """The matchings that rounds are made of; disjoint except for `greedy`."""
    probabilities: tuple[float, ...]
    """How often each matching is used."""
    alpha: float
    """The weight of a neighbour's value: α of eq. 8, or ½ for pairwise mixing."""
    schedule: Bernoulli | Choice | Periodic | Cycle
    timing: Timing
    num_colors: int
    """M, the matchings of the edge colouring: what the budget is a fraction of."""
    rho: float
    """‖E[WᵀW] − J‖₂, the contraction of disagreement an iteration; < 1 means consensus."""
    algebraic_connectivity: float
    """λ₂ of the expected topology Σ p_j L_j (eq. 5)."""
    expected_comm_time: float
    """Communication time an iteration, in the delay model's unit."""
    consensus_error: float | None = None
    """Steady-state disagreement tr(X)/m under unit gradient noise; None where too large to find."""
    certificate: Certificate | None = None
    """How close to optimal the probabilities are known to be."""
    notes: tuple[str, ...] = ()
    """What a user should know about this plan."""

    def __post_init__(self) -> None:
        check_budget(self.budget)
        if self.mixing not in ("laplacian", "pairwise"):
            raise PlanError(f"mixing is {self.mixing!r}, but it is 'laplacian' or 'pairwise'.")
        if len(self.probabilities) != len(self.matchings):
            raise PlanError(
                f"{len(self.probabilities)} probabilities were given "
                f"for {len(self.matchings)} matchings."
            )
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise PlanError(f"the mixing weight is {self.alpha!r}, but it must be positive.")
        check_matchings(self.topology, self.matchings)

    # -- what happens when ----------------------------------------------------------------------

    @property
    def num_workers(self) -> int:
        """How many workers the plan is for."""
        return self.topology.num_workers

    def round(self, k: int) -> Round:
        """What is active at iteration k: a pure function of (seed, k)."""
        if k < 0:
            raise InputError(f"iterations count from 0, but round {k} was asked for.")
        return self._round(self.schedule.active(k))

    def rounds(self, start: int = 0, stop: int | None = None) -> Iterator[Round]:
        """The rounds of iterations start, start + 1, … in order; quicker than one by one."""
        make = self._round
        return map(make, self.schedule.actives(start, stop))

    def _round(self, active: tuple[int, ...]) -> Round:
        known = self._known_rounds
        round_ = known.get(active)
        if round_ is None:
            round_ = Round(
                matchings=tuple(self.matchings[j] for j in active),
                indices=active,
                mixing=self.mixing,
                weight=self.alpha,
            )
            if len(known) < 1 << 16:
                known[active] = round_
        return round_

    @cached_property
    def _known_rounds(self) -> dict[tuple[int, ...], Round]:
        return {}

    def round_time(self, round: Round) -> float:
        """The communication time of a round, in the delay model's unit."""
        return self.timing.round_time(round.matchings)

    def mixing_matrix(self, k: int) -> npt.NDArray[np.float64]:
        """W(k) as a dense matrix: new x = W(k) @ x, rows are workers. For small m."""
        return self.round(k).matrix(self.num_workers)

    # -- what it promises -----------------------------------------------------------------------

    @property
    def smallest_self_weight(self) -> float:
        """The least weight that a worker ever gives its own value in one round.

        Under Laplacian mixing it is 1 − dα for a worker with d active links; below zero the
        update extrapolates, which amplifies noise and may diverge at large learning rates.
        """
        if self.mixing == "pairwise":
            return 1 - self.alpha
        if isinstance(self.schedule, Choice):
            return 1 - self.alpha
        used = [m for m, p in zip(self.matchings, self.probabilities, strict=True) if p > 0]
        degrees = np.zeros(self.num_workers, dtype=np.int64)
        for matching in used:
            for i, j in matching:
                degrees[i] += 1
                degrees[j] += 1
        return float(1 - self.alpha * degrees.max())

    @cached_property
    def digest(self) -> str:
        """A fingerprint of everything that workers must agree on."""
        document = self.to_json()
        for incidental in ("certificate", "notes"):
            document.pop(incidental)
        return fingerprint(document)

    # -- in and out -----------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON values."""
        return {
            "schema": SCHEMA,
            "strategy": self.strategy,
            "budget": self.budget,
            "seed": self.seed,
            "mixing": self.mixing,
            "alpha": self.alpha,
            "rho": self.rho,
            "algebraic_connectivity": self.algebraic_connectivity,
            "expected_comm_time": self.expected_comm_time,
            "consensus_error": self.consensus_error,
            "num_colors": self.num_colors,
            "probabilities": list(self.probabilities),
            "matchings": [[list(link) for link in matching] for matching in self.matchings],
            "schedule": self.schedule.to_json(),
            "timing": self.timing.to_json(),
            "topology": self.topology.to_json(),
            "certificate": None if self.certificate is None else asdict(self.certificate),
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, document: Any) -> Plan:
        """The plan in a JSON document, validated.

        Raises:
            PlanError: The document is not a plan of this version, or a part of it is not valid.
        """
        if not isinstance(document, dict) or "schema" not in document:
            raise PlanError("it is not a matcha plan (no schema name inside).")
        if document["schema"] != SCHEMA:
            raise PlanError(f"its schema is {document['schema']!r}, but {SCHEMA!r} is wanted.")
        try:
            return cls._from_fields(document)
        except InputError as error:
            raise PlanError(str(error)) from None
        except KeyError as error:
            raise PlanError(f"it lacks {error.args[0]!r}.") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise PlanError(f"a part of it is malformed ({error}).") from None

    @classmethod
    def _from_fields(cls, document: dict[str, Any]) -> Plan:
        topology = Topology.from_json(document["topology"])
        probabilities = tuple(float(p) for p in document["probabilities"])
        certificate = document["certificate"]
        return cls(
            topology=topology,
            strategy=str(document["strategy"]),
            budget=float(document["budget"]),
            seed=int(document["seed"]),
            mixing=document["mixing"],
            matchings=tuple(
                tuple((int(i), int(j)) for i, j in matching) for matching in document["matchings"]
            ),
            probabilities=probabilities,
            alpha=float(document["alpha"]),
            schedule=schedule_from_json(document["schedule"], probabilities, int(document["seed"])),
            timing=timing_from_json(document["timing"], topology),
            num_colors=int(document["num_colors"]),
            rho=float(document["rho"]),
            algebraic_connectivity=float(document["algebraic_connectivity"]),
            expected_comm_time=float(document["expected_comm_time"]),
            consensus_error=_optional_float(document["consensus_error"]),
            certificate=None if certificate is None else Certificate(**certificate),
            notes=tuple(str(note) for note in document["notes"]),
        )

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, with a checksum, whole or not at all."""
        save_document(self.to_json(), Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
            PlanError: The file is missing, foreign, truncated or damaged.
        """
        return read_plan(path, cls.from_json)

    def summary(self) -> str:
        """The plan in a few lines of text."""
        unit = self.timing.unit
        lines = [
            f"{self.strategy} plan at budget {self.budget:g} for {self.topology}",
            f"  {len(self.matchings)} matchings, {self.mixing} mixing, "
            f"weight {self.alpha:.4f}, seed {self.seed}",
            f"  rho {self.rho:.4f}, algebraic connectivity {self.algebraic_connectivity:.4g}",
            f"  {self.expected_comm_time:.4g} {unit} of communication an iteration",
        ]
        if self.consensus_error is not None:
            lines.append(f"  steady-state consensus error {self.consensus_error:.4g}")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.summary()


def read_plan(path: str | Path, make: Callable[[dict[str, Any]], _P]) -> _P:
    """What `make` makes of the document in a file.

    Raises:
        PlanError: The file is missing, foreign, truncated, damaged, or not a valid plan.
    """
    try:
        document = load_document(Path(path))
    except InputError as error:
        raise PlanError(str(error)) from None
    try:
        return make(document)
    except PlanError as error:
        raise PlanError(f"{str(path)!r} is not a usable plan: {error}") from None


def check_budget(budget: float) -> None:
    """Refuse a budget outside (0, 1].

    Raises:
        InputError: The budget is not a fraction in (0, 1].
    """
    if not 0 < budget <= 1:
        raise InputError(
            f"the budget is {budget!r}, but it is a fraction of vanilla's communication: "
            "choose it in (0, 1]."
        )


def _optional_float(value: Any) -> float | None:
    return None if value is None else float(value)
