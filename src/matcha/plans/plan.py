"""The plan: which links talk, how often, with which weights. A value, saved as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar

from matcha import theory
from matcha._io import decode_number, encode_number, fingerprint, load_document
from matcha._numerics.certificates import Certificate
from matcha.errors import InputError, PlanError
from matcha.plans.averaging import all_reduce_time
from matcha.plans.degrees import given_away
from matcha.plans.figures import Figures
from matcha.plans.protocol import Members
from matcha.plans.reduced import kept, known_links, known_workers, numbered_anew
from matcha.plans.shares import check_alpha, check_shares, kept_shares, shares_from_json, spread
from matcha.rounds import EXACT, MIXINGS, ONE_WAY, Mixing, Round, Shares, check_separable
from matcha.schedules import SCHEDULES, Schedule
from matcha.timing import TIMINGS, Timing
from matcha.topology import Link, Matching, Topology, check_matchings
from matcha.wires import Float, Wire, parse_wire

SCHEMA = "matcha.plan/2"
READABLE = (SCHEMA, "matcha.plan/1")
"""Version 1, of matcha 0.1, had the same members."""
_KNOWN_ROUNDS = 1 << 16  # rounds repeat; beyond this many different ones, make them anew
_EXACT_ERROR_LIMIT = 256  # workers; the exact error takes 0.7 s there and 12 s at 512
_P = TypeVar("_P")


@dataclass(frozen=True, kw_only=True)
class Plan(Members):
    """A topology, and who talks when on it and with which weights; all else follows from these.

    `plan.round(k)` says what happens at iteration k: the same on every worker, in any order of k.
    `dataclasses.replace` changes parts; what a plan promises (`rho`, …) is derived from its parts.
    """

    topology: Topology
    strategy: str
    budget: float
    mixing: Mixing
    matchings: tuple[Matching, ...]
    """The matchings that rounds are made of; disjoint except for `greedy`."""
    alpha: float
    """The weight of a neighbour's value: α of eq. 8, or ½ for pairwise mixing."""
    weights: Shares | None = None
    """One for each link of each matching, in place of α."""
    schedule: Schedule
    """Which of the matchings are active when; it owns their probabilities and the seed."""
    timing: Timing
    num_colors: int
    """M, the matchings of the edge colouring: what the budget is a fraction of."""
    wire: Wire = field(default_factory=Float)
    """What messages hold; the delay model's times are those of its messages."""
    certificate: Certificate | None = None
    """How close to optimal the probabilities are known to be."""
    notes: tuple[str, ...] = ()
    """What a user should know about this plan."""
    figures: Figures = field(default_factory=Figures, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.budget <= 1:
            raise PlanError(f"the budget is {self.budget!r}, but it is a fraction: 0 to 1.")
        if self.mixing not in MIXINGS:
            raise PlanError(f"mixing is {self.mixing!r}, but it is {' or '.join(MIXINGS)}.")
        if len(self.schedule.probabilities) != len(self.matchings):
            raise PlanError(
                f"{len(self.schedule.probabilities)} probabilities were given "
                f"for {len(self.matchings)} matchings."
            )
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise PlanError(f"the mixing weight is {self.alpha!r}, but it must be positive.")
        if self.num_colors < 1:
            raise PlanError(f"the number of colours is {self.num_colors!r}, but it is at least 1.")
        check_matchings(self.topology, self.matchings, push=self.mixing in ONE_WAY)
        check_shares(
            self.weights, self.matchings, self.mixing, repeats=self.schedule.period is not None
        )
        check_alpha(self.alpha, self.weights, self.figures.parts[-2:] or None)
        object.__setattr__(self, "figures", self.figures.held_for(self._deciding))

    @property
    def _deciding(self) -> tuple[Any, ...]:
        """The parts that decide what happens, and so what the plan promises."""
        return (
            self.topology,
            self.matchings,
            self.schedule,
            self.mixing,
            self.alpha,
            self.weights,
        )

    # -- what happens when ----------------------------------------------------------------------

    @property
    def probabilities(self) -> tuple[float, ...]:
        """How often each matching is used."""
        return self.schedule.probabilities

    @property
    def seed(self) -> int:
        """What the draws, and the searches on the way, began with."""
        return self.schedule.seed

    @property
    def levels(self) -> tuple[Plan, ...]:
        """The plans that decide the rounds: this one alone."""
        return (self,)

    def level_at(self, k: int) -> Plan:
        """The plan in force at iteration k: this one."""
        return self

    def _round(self, k: int) -> Round:
        return self._made(self.schedule.active(k))

    def _rounds(self, start: int, stop: int | None) -> Iterator[Round]:
        return map(self._made, self.schedule.actives(start, stop))

    @cached_property
    def _made(self) -> Callable[[tuple[int, ...]], Round]:
        matchings, weights = self.matchings, self.weights
        mixing, weight = self.mixing, self.alpha

        @lru_cache(maxsize=_KNOWN_ROUNDS)
        def made(active: tuple[int, ...]) -> Round:
            active = tuple(j for j in active if matchings[j])  # of some nothing may be left
            return Round.of_active(matchings, active, mixing=mixing, weight=weight, weights=weights)

        return made

    # -- for those who are left -------------------------------------------------------------------

    def without(self, workers: Iterable[int]) -> Plan:
        """The plan of those who are left when some workers are gone; all keep their numbers.

        The rounds are the same but for the meetings of those who are gone, so every worker makes
        the same plan of it, with one digest. Figures (ρ, …) are of those who are left; where they
        fall apart into islands there is no consensus over all, and ρ is 1.

        >>> import matcha
        >>> plan = matcha.plan(matcha.families.complete(4), 0.5, "periodic")
        >>> left = plan.without([3])
        >>> left.num_workers, {worker for link in left.round(1).links for worker in link}
        (4, {0, 1, 2})

        Raises:
            InputError: There is no such worker, or at most one would be left.
        """
        gone = known_workers(self.topology, workers)
        if self.num_workers - len(gone) < 2:
            raise InputError("a plan is for at least two workers, but fewer would be left.")
        return self._reduced(gone, frozenset()) if gone else self

    def without_links(self, links: Iterable[Link]) -> Plan:
        """The plan with some links cut: the same rounds but for the meetings over them.

        Raises:
            InputError: There is no such link.
        """
        cut = known_links(self.topology, links)
        return self._reduced(frozenset(), cut) if cut else self

    def _reduced(self, workers: frozenset[int], links: frozenset[Link]) -> Plan:
        check_separable(self.mixing)
        if self.mixing == "push" and not self.topology.directed:
            links = links | {(j, i) for i, j in links}
        matchings = kept(self.matchings, workers, links)
        weights = kept_shares(self.weights, self.matchings, matchings)
        parts = [f"worker {worker}" for worker in sorted(workers)]
        parts += [f"link {i}–{j}" for i, j in sorted(links)]
        note = f"without {', '.join(parts)}."
        plan = replace(
            self,
            matchings=matchings,
            weights=weights,
            certificate=None,
            notes=(*self.notes, note),
        )
        rest = numbered_anew(self.topology, matchings, workers)
        if rest is None or self.num_workers > _EXACT_ERROR_LIMIT:
            return plan
        alone = replace(plan, topology=rest[0], matchings=rest[1])
        figures = Figures(
            rho=alone.rho,
            algebraic_connectivity=alone.algebraic_connectivity,
            consensus_error=alone.consensus_error,
        )
        return replace(plan, figures=figures)

    # -- what it promises: derived from the parts -------------------------------------------------

    @cached_property
    def rho(self) -> float:
        """‖E[WᵀW] − J‖₂, the contraction of disagreement an iteration; < 1 means consensus."""
        known = self.figures.rho
        return theory.contraction(self) if known is None else known

    @property
    def rho_kind(self) -> str:
        """What `rho` is of: one `step`, or the mean over a `cycle`; the two do not compare."""
        return "cycle" if theory.averages_over_cycle(self) else "step"

    @cached_property
    def algebraic_connectivity(self) -> float:
        """λ₂ of the expected topology Σ p_j L_j (eq. 5)."""
        known = self.figures.algebraic_connectivity
        return theory.connectivity(self) if known is None else known

    @cached_property
    def consensus_error(self) -> float | None:
        """Steady-state disagreement tr(X)/m under unit gradient noise; None where too large.

        A wire that leaves a share ε of a meeting's squared difference removes 1 − ε of what whole
        values would; in the steady state as much is removed as comes in, so there is 1/(1 − ε) as
        much of it.
        """
        error = self.figures.consensus_error
        if error is None:
            error = theory.consensus_error(self, max_workers=_EXACT_ERROR_LIMIT)
        return None if error is None else error / (1 - self.wire.residual)

    @cached_property
    def expected_comm_time(self) -> float:
        """Communication time per iteration, in the delay model's unit."""
        if self.mixing == "average":
            return max(self.probabilities) * all_reduce_time(self.timing, self.topology)
        return self.schedule.expected_time(self.timing, self.matchings)

    @cached_property
    def smallest_self_weight(self) -> float:
        """The least weight that a worker gives its own value in a round that really happens.

        Under Laplacian mixing it is 1 − dα for a worker with d active links; below zero the
        update extrapolates, which amplifies noise and may diverge at large learning rates. Of
        rounds that are drawn, those count that come at least once in a million iterations.
        """
        if self.mixing in EXACT:
            return self.alpha
        if self.mixing != "laplacian":
            shares = ((self.alpha,),) if self.weights is None else self.weights
            return 1 - max((w for some in shares for w in some), default=0.0)
        given = given_away(self.schedule, self.matchings, self.weights)
        return float(1 - given if self.weights is not None else 1 - self.alpha * given)

    @cached_property
    def needs_push_sum(self) -> bool:
        """Whether messages go one way without coming round, so that x needs a weight ω beside it.

        Where everyone receives as much as it gives away ω stays 1, and nothing extra is sent.
        """
        rounds = (self._made(active) for active in self.schedule.largest)
        return not all(round_.keeps_shares for round_ in rounds)

    @cached_property
    def omega(self) -> tuple[float, ...] | None:
        """Each worker's push-sum weight, on average over a cycle; None where all stay 1.

        None as well where rounds are drawn, or workers are too many for it.
        """
        many = self.num_workers > _EXACT_ERROR_LIMIT
        if not self.needs_push_sum or self.schedule.period is None or many:
            return None
        return theory.push_sum_weights(self)

    @cached_property
    def digest(self) -> str:
        """A fingerprint of what decides the rounds: what workers must agree on.

        Figures are no part of it, so that none depends on the last bit of an eigenvalue; nor is
        the seed where rounds repeat and nothing is drawn.
        """
        drawn = self.schedule.period is None
        # Weights a link stand in α's place, which then decides nothing.
        own = {"weight": self.alpha} if self.weights is None else {"weights": self.weights}
        return fingerprint(
            own
            | {
                "num_workers": self.num_workers,
                "links": self.topology.links,
                "matchings": self.matchings,
                "schedule": self.schedule.to_json(),
                "probabilities": self.probabilities,
                "seed": self.seed if drawn else None,
                "mixing": self.mixing,
            }
            | ({} if self.wire == Float() else {"wire": self.wire.name})
        )

    # -- in and out -----------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON values."""
        return {
            "schema": SCHEMA,
            "strategy": self.strategy,
            "budget": self.budget,
            "seed": self.seed,
            "mixing": self.mixing,
            "wire": self.wire.name,
            "alpha": self.alpha,
            "rho": encode_number(self.rho),
            "algebraic_connectivity": self.algebraic_connectivity,
            "expected_comm_time": self.expected_comm_time,
            "consensus_error": encode_number(self.consensus_error),
            "num_colors": self.num_colors,
            "probabilities": list(self.probabilities),
            "matchings": [[list(link) for link in matching] for matching in self.matchings],
            "schedule": SCHEDULES.to_json(self.schedule),
            "timing": TIMINGS.to_json(self.timing),
            "topology": self.topology.to_json(),
            "certificate": None if self.certificate is None else asdict(self.certificate),
            "notes": list(self.notes),
            **({} if self.weights is None else {"weights": [list(w) for w in self.weights]}),
        }

    @classmethod
    def from_json(cls, document: Any) -> Plan:
        """The plan in a JSON document, validated.

        Raises:
            PlanError: The document is not a plan of this version, or a part of it is not valid.
        """
        if not isinstance(document, dict) or "schema" not in document:
            raise PlanError("it is not a matcha plan (no schema name inside).")
        if document["schema"] not in READABLE:
            raise PlanError(
                f"its schema is {document['schema']!r}, but {SCHEMA!r} is wanted: "
                "make it anew with `matcha plan`."
            )
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
        wire = parse_wire(str(document.get("wire", "float32")))  # 0.1 knew no other
        error = _optional_float(document["consensus_error"])
        return cls(
            topology=topology,
            strategy=str(document["strategy"]),
            budget=float(document["budget"]),
            mixing=document["mixing"],
            matchings=tuple(
                tuple((int(i), int(j)) for i, j in matching) for matching in document["matchings"]
            ),
            alpha=float(document["alpha"]),
            weights=shares_from_json(document.get("weights")),
            schedule=SCHEDULES.from_json(
                document["schedule"], probabilities, int(document["seed"])
            ),
            timing=TIMINGS.from_json(document["timing"], topology),
            num_colors=int(document["num_colors"]),
            wire=wire,
            certificate=None if certificate is None else Certificate(**certificate),
            notes=tuple(str(note) for note in document["notes"]),
            figures=Figures(
                rho=_optional_float(document["rho"]),
                algebraic_connectivity=_optional_float(document["algebraic_connectivity"]),
                consensus_error=None if error is None else error * (1 - wire.residual),
            ),
        )

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
            f"{spread(self.weights, self.alpha)}, seed {self.seed}",
            f"  rho {self.rho:.4f} ({self.rho_kind}), "
            f"algebraic connectivity {self.algebraic_connectivity:.4g}",
            f"  {self.expected_comm_time:.4g} {unit} of communication per iteration",
        ]
        if self.wire != Float():
            lines.append(
                f"  messages: {self.wire.name}, {1 / self.wire.size_ratio():.1f} times smaller"
            )
        if self.consensus_error is not None:
            lines.insert(2, f"  steady-state consensus error {self.consensus_error:.4g}")
        if self.omega is not None:
            lines.append(
                f"  push-sum: messages do not come round, and workers' weights go from "
                f"{min(self.omega):.3g} to {max(self.omega):.3g}"
            )
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


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
    return None if value is None else float(decode_number(value))
