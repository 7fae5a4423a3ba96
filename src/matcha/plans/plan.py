"""The plan: which links talk, how often, with which weights. A value, saved as JSON."""

from __future__ import annotations

import html
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from matcha import theory
from matcha._io import (
    decode_number,
    encode_number,
    explain_malformed,
    fingerprint,
    load_document,
    save_document,
)
from matcha._io.tables import amount, count_noun
from matcha._numerics import Certificate
from matcha.errors import InputError, PlanError
from matcha.plans import drawing
from matcha.rounds import Mixing, Round, RoundProcess, Shares, check_links
from matcha.schedules import SCHEDULES, Schedule
from matcha.timing import TIMINGS, Timing, all_reduce_time
from matcha.topology import Link, Matching, Topology
from matcha.topology.drawing import axes_or_new
from matcha.wires import Float, TopK, Wire, parse_wire

SCHEMA = "matcha.plan/2"
READABLE = (SCHEMA, "matcha.plan/1")
"""Version 1, of matcha 0.1, had the same members."""
_EXACT_ERROR_LIMIT = 256  # workers; the exact error takes 0.7 s there and 12 s at 512


@dataclass(frozen=True, kw_only=True, slots=True)
class OuterStep:
    """A step of its own after each round: v ← βv + α(x̄ − φ), φ ← φ + v, x ← φ.

    φ is where the worker stood after the round before, x̄ what this round made of its parameters.

    >>> OuterStep(momentum=0.5, nesterov=False)
    OuterStep(rate=0.7, momentum=0.5, nesterov=False, rate_first=False)
    """

    rate: float = 0.7
    """α, of the way to x̄."""
    momentum: float = 0.9
    """β, of the step before."""
    nesterov: bool = True
    """Step along α(x̄ − φ) + βv, as DiLoCo does, and not along v, as NoLoCo does."""
    rate_first: bool = False
    """Exchange φ + α(x − φ), as GASLoC does, and not x; after an exact average it is the same."""

    def __post_init__(self) -> None:
        if not (isinstance(self.rate, (int, float)) and 0 < self.rate <= 2):
            raise InputError(f"an outer rate is above 0 and at most 2, not {self.rate!r}.")
        if not (isinstance(self.momentum, (int, float)) and 0 <= self.momentum < 1):
            raise InputError(f"an outer momentum is in [0, 1), not {self.momentum!r}.")


class AnyPlan(ABC):
    """What a plan and a staged plan have in common: rounds on a topology, and a file."""

    timing: Timing

    @property
    @abstractmethod
    def topology(self) -> Topology:
        """The workers and their links."""

    @abstractmethod
    def round(self, k: int) -> Round:
        """The round of iteration k: the same on every worker, in any order of k."""

    @abstractmethod
    def rounds(self, start: int = 0, stop: int | None = None) -> Iterator[Round]:
        """The rounds of iterations start, start + 1, … in order; quicker than one by one."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON values."""

    @abstractmethod
    def summary(self) -> str:
        """The plan in a few lines of text."""

    @property
    def num_workers(self) -> int:
        """How many workers the plan is for."""
        return self.topology.num_workers

    def animate(self, rounds: int = 20, values: npt.ArrayLike | None = None) -> drawing.Animation:
        """The first rounds as a moving picture, which a notebook shows and `save` writes as SVG.

        Args:
            rounds: How many.
            values: One number for each worker at the start; by default drawn once for all.
        """
        return drawing.animate(self.topology, list(self.rounds(0, rounds)), values)

    def round_time(self, round: Round) -> float:
        """The communication time of a round, in the delay model's unit."""
        if round.is_all_reduce and round:
            return all_reduce_time(self.timing, self.topology)
        return self.timing.round_time(round.matchings)

    def mixing_matrix(self, k: int) -> npt.NDArray[np.float64]:
        """W(k) as a dense matrix: new x = W(k) @ x, rows are workers. For small m."""
        return self.round(k).matrix(self.num_workers)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, with a checksum, whole or not at all."""
        save_document(self.to_json(), Path(path))

    def __str__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        return f"{self._picture()}<pre>{html.escape(self.summary())}</pre>"

    def _picture(self) -> str:
        return self.topology.picture()


@dataclass(frozen=True, kw_only=True)
class Plan(AnyPlan):
    """Which links talk when, with which weights, and what that was planned for.

    `plan.round(k)` is what happens at iteration k: the same on every worker, in any order of k.
    Its `process` decides the rounds; the rest says what they were planned for.
    """

    process: RoundProcess
    """Topology, matchings, schedule and mixing: what theory and engines need."""
    strategy: str
    budget: float
    timing: Timing
    num_colors: int
    """M, the matchings of the edge colouring: what the budget is a fraction of."""
    wire: Wire = field(default_factory=Float)
    """What messages hold; the delay model's times are those of its messages."""
    outer: OuterStep | None = None
    """What follows each round; None: nothing does."""
    certificate: Certificate | None = None
    """How close to optimal the probabilities are known to be."""
    worker_weights: tuple[float, ...] | None = None
    """How much each worker counts, 1 on average: training is towards their weighted average."""
    notes: tuple[str, ...] = ()
    """What a user should know about this plan."""

    def __post_init__(self) -> None:
        if not 0 <= self.budget <= 1:
            raise PlanError(f"the budget is {self.budget!r}, but it is a fraction: 0 to 1.")
        if isinstance(self.wire, TopK) and self.mixing != "average":
            raise PlanError(f"the wire {self.wire.name} is for averages, not {self.mixing} mixing.")
        if self.num_colors < 1:
            raise PlanError(f"the number of colours is {self.num_colors!r}, but it is at least 1.")
        given, m = self.worker_weights, self.num_workers
        if given is None:
            return
        total = math.fsum(given)
        if len(given) != m or not (0 < total < math.inf and min(given) >= 0):
            raise PlanError(
                f"worker_weights are {list(given)!r}, but they are a number of 0 or more for each "
                f"of {m} workers, such as how many examples it has."
            )
        exact = math.isclose(total, m, rel_tol=1e-12)  # a file's stay as they are
        shares = tuple(float(weight) if exact else weight * m / total for weight in given)
        object.__setattr__(self, "worker_weights", shares)

    # -- its rounds -------------------------------------------------------------------------------

    @property
    def topology(self) -> Topology:
        """The workers and their links."""
        return self.process.topology

    @property
    def matchings(self) -> tuple[Matching, ...]:
        """The matchings that rounds are made of; disjoint except for `greedy`."""
        return self.process.matchings

    @property
    def schedule(self) -> Schedule:
        """Which of the matchings are active when."""
        return self.process.schedule

    @property
    def mixing(self) -> Mixing:
        """How a round's exchanges become new values: `laplacian`, `pairwise` and others."""
        return self.process.mixing

    @property
    def alpha(self) -> float:
        """The weight of a neighbour's value: α of eq. 8, or ½ for pairwise mixing."""
        return self.process.alpha

    @property
    def weights(self) -> Shares | None:
        """A weight for each link of each matching, in place of α."""
        return self.process.weights

    @property
    def probabilities(self) -> tuple[float, ...]:
        """How often each matching is used."""
        return self.schedule.probabilities

    @property
    def seed(self) -> int:
        """The seed of the draws, and of the searches on the way."""
        return self.schedule.seed

    @property
    def levels(self) -> tuple[Plan, ...]:
        """The plans that decide the rounds: this one alone."""
        return (self,)

    def level_at(self, k: int) -> Plan:
        """The plan in force at iteration k: this one."""
        return self

    @property
    def members(self) -> tuple[int, ...]:
        """The workers that take part: all, except where some have left or others joined."""
        return tuple(w for w in range(self.num_workers) if w not in self.process.gone)

    def steps_before(self, k: int) -> int:
        """How many steps all workers together take before iteration k."""
        return k * len(self.members)

    def round(self, k: int) -> Round:
        """The round of iteration k: the same on every worker, in any order of k."""
        return self.process.round(k)

    def rounds(self, start: int = 0, stop: int | None = None) -> Iterator[Round]:
        """The rounds of iterations start, start + 1, … in order; quicker than one by one."""
        return self.process.rounds(start, stop)

    def with_process(self, **changes: Any) -> Plan:
        """The plan with parts of its process changed, as `dataclasses.replace` changes them.

        Raises:
            PlanError: `alpha` was given to a plan whose links have weights of their own.
        """
        if "alpha" in changes and "weights" not in changes and self.weights is not None:
            raise PlanError(
                f"alpha was changed to {changes['alpha']!r}, but this plan has a weight for each "
                "link in its place: give weights=None as well."
            )
        return replace(self, process=replace(self.process, **changes))

    def without(self, workers: Iterable[int]) -> Plan:
        """The plan of the workers that are left when some are gone; all keep their numbers.

        The rounds are the same except for the meetings of the workers that are gone, so every
        worker derives the same plan, with one digest. Figures (ρ, …) are of the workers left; where
        they fall apart into islands there is no consensus over all, and ρ is 1.

        >>> import matcha
        >>> plan = matcha.plan(matcha.families.complete(4), 0.5, "periodic")
        >>> left = plan.without([3])
        >>> left.num_workers, {worker for link in left.round(1).links for worker in link}
        (4, {0, 1, 2})

        Raises:
            InputError: There is no such worker, or at most one would be left.
        """
        gone = sorted(set(workers))
        return self._reduce(self.process.without(gone), *(f"worker {worker}" for worker in gone))

    def without_links(self, links: Iterable[Link]) -> Plan:
        """The plan with some links cut: the same rounds except for the meetings over them."""
        cut = sorted(check_links(self.topology, links))
        return self._reduce(self.process.without(links=cut), *(f"link {i}–{j}" for i, j in cut))

    def _reduce(self, process: RoundProcess, *lost: str) -> Plan:
        if process is self.process:
            return self
        notes = (*self.notes, f"without {', '.join(lost)}.")
        return replace(self, process=process, certificate=None, notes=notes)

    # -- what it promises: derived from the parts -------------------------------------------------

    @property
    def rho(self) -> float:
        """‖E[WᵀW] − J‖₂, the contraction of disagreement per iteration; < 1 means consensus."""
        return theory.contraction(self.process)

    @property
    def rho_kind(self) -> str:
        """What `rho` is of: one `step`, or the mean over a `cycle`; the two do not compare."""
        return "cycle" if theory.averages_over_cycle(self.process) else "step"

    @property
    def algebraic_connectivity(self) -> float:
        """λ₂ of the expected topology Σ p_j L_j (eq. 5)."""
        return theory.connectivity(self.process)

    @property
    def consensus_error(self) -> float | None:
        """Steady-state disagreement tr(X)/m under unit gradient noise; None where too large.

        A wire that leaves a share ε of a meeting's squared difference removes 1 − ε of what whole
        values would; in the steady state as much is removed as comes in, so there is 1/(1 − ε) as
        much of it.
        """
        error = theory.consensus_error(self.process, max_workers=_EXACT_ERROR_LIMIT)
        return None if error is None else error / (1 - self.wire.residual)

    @cached_property
    def expected_comm_time(self) -> float:
        """Communication time per iteration, in the delay model's unit."""
        if self.process.is_all_reduce:
            return max(self.probabilities) * all_reduce_time(self.timing, self.topology)
        return self.schedule.expected_time(self.timing, self.matchings)

    @property
    def smallest_self_weight(self) -> float:
        """The least weight that a worker gives its own value in a round that really happens."""
        return self.process.smallest_self_weight

    @property
    def needs_push_sum(self) -> bool:
        """Whether messages go one way without coming round, so that x needs a weight ω."""
        return self.process.needs_push_sum

    @cached_property
    def omega(self) -> tuple[float, ...] | None:
        """Each worker's push-sum weight, on average over a cycle; None where all stay 1.

        None as well where rounds are drawn, or workers are too many for it.
        """
        many = self.num_workers > _EXACT_ERROR_LIMIT
        if not self.needs_push_sum or self.schedule.period is None or many:
            return None
        return theory.push_sum_weights(self.process)

    @cached_property
    def digest(self) -> str:
        """A fingerprint of what decides the rounds: what workers must agree on.

        Figures are not part of it, so that it never depends on the last bit of an eigenvalue; nor
        is the seed where rounds repeat and nothing is drawn.
        """
        parts = {
            "num_workers": self.num_workers,
            "links": self.topology.links,
            "matchings": self.matchings,
            "schedule": self.schedule.to_json(),
            "probabilities": self.probabilities,
            "seed": self.seed if self.schedule.period is None else None,
            "mixing": self.mixing,
            **self._choices(),
        }
        # Weights per link replace α, which then decides nothing.
        parts |= {"weight": self.alpha} if self.weights is None else {"weights": self.weights}
        return fingerprint(parts | ({} if self.wire == Float() else {"wire": self.wire.name}))

    def _choices(self) -> dict[str, Any]:
        """What few plans have, as JSON."""
        weights = None if self.worker_weights is None else list(self.worker_weights)
        outer = None if self.outer is None else asdict(self.outer)
        found = {"outer": outer, "worker_weights": weights}
        return {name: value for name, value in found.items() if value is not None}

    # -- looking at it --------------------------------------------------------------------------

    @property
    def link_activity(self) -> dict[Link, float]:
        """How often each link is used, in exchanges per iteration; in messages, of a one-way link.

        Zero for every link where workers average all at once, as `allreduce` and `local` do.
        """
        return drawing.link_activity(self.process)

    def plot(self, ax: Any = None) -> Any:
        """Draw how often each link is used, on matplotlib's axes or a new figure's; returns them.

        Raises:
            PackageError: matplotlib is not installed.
        """
        ax = axes_or_new(ax)
        drawing.plot(ax, self.process)
        name = f"{self.topology.name} · {self.strategy} at budget {self.budget:g}"
        ax.set_title(f"{name} · ρ = {self.rho:.4f}", fontsize=11)
        return ax

    def _picture(self) -> str:
        return self.topology.picture(styles=drawing.link_styles(self.process))

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
            **({"gone": sorted(self.process.gone)} if self.process.gone else {}),
            **self._choices(),
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
                "make it again with `matcha plan`."
            )
        with explain_malformed(PlanError):
            topology = Topology.from_json(document["topology"])
            probabilities, seed = (
                _floats(document["probabilities"]),
                operator.index(document["seed"]),
            )
            weights, counts = document.get("weights"), document.get("worker_weights")
            certificate, outer = document["certificate"], document.get("outer")
            wire = parse_wire(str(document.get("wire", "float32")))  # 0.1 knew no other
            process = RoundProcess(
                topology=topology,
                matchings=tuple(
                    tuple((operator.index(i), operator.index(j)) for i, j in matching)
                    for matching in document["matchings"]
                ),
                schedule=SCHEDULES.from_json(document["schedule"], probabilities, seed),
                mixing=document["mixing"],
                alpha=float(document["alpha"]),
                weights=None if weights is None else tuple(map(_floats, weights)),
                gone=frozenset(map(operator.index, document.get("gone", ()))),
            )
            process.remember(**_read_figures(document, process, 1 - wire.residual))
            return cls(
                process=process,
                strategy=str(document["strategy"]),
                budget=float(document["budget"]),
                timing=TIMINGS.from_json(document["timing"], topology),
                num_colors=operator.index(document["num_colors"]),
                wire=wire,
                outer=None if outer is None else OuterStep(**outer),
                worker_weights=None if counts is None else _floats(counts),
                certificate=None if certificate is None else _read_certificate(certificate),
                notes=tuple(str(note) for note in document["notes"]),
            )

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote; `matcha.load_plan` reads staged plans too.

        Raises:
            PlanError: The file is missing, foreign, truncated or damaged.
        """
        return load_document(path, cls.from_json)

    def summary(self) -> str:
        """The plan in a few lines of text."""
        weight = f"weight {self.alpha:.4f}"
        if self.weights is not None:
            every = [w for shares in self.weights for w in shares]
            weight = f"weights {min(every, default=0.0):.2f} to {max(every, default=0.0):.2f}"
        lines = [
            f"{self.strategy} plan at budget {self.budget:g} for {self.topology}",
            f"  {count_noun(len(self.matchings), 'matching')}, {self.mixing} mixing, {weight}, "
            f"seed {self.seed}",
        ]
        if self.consensus_error is not None:
            lines += [f"  steady-state consensus error {error_in_words(self.consensus_error)}"]
        time = amount(self.expected_comm_time, self.timing.unit)
        lines += [
            f"  rho {self.rho:.4f} ({self.rho_kind}), "
            f"algebraic connectivity {self.algebraic_connectivity:.4g}",
            f"  {time} of communication per iteration",
        ]
        if self.wire != Float():
            smaller = 1 / self.wire.size_ratio()
            lines += [f"  messages: {self.wire.name}, {smaller:.1f} times smaller"]
        if self.outer is not None:
            kind = "Nesterov" if self.outer.nesterov else "heavy-ball"
            step = f"rate {self.outer.rate:g}, {kind} momentum {self.outer.momentum:g}"
            lines += [f"  outer steps after rounds: {step}"]
        if self.omega is not None:
            span = f"{min(self.omega):.3g} to {max(self.omega):.3g}"
            lines += [
                f"  push-sum: messages do not come round, and workers' weights go from {span}"
            ]
        if self.worker_weights is not None:
            span = f"{min(self.worker_weights):.3g} to {max(self.worker_weights):.3g}"
            lines += [f"  workers count {span} times as much as on average"]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def error_in_words(error: float) -> str:
    """A consensus error in words; what rounding leaves of an exact average counts as none.

    >>> error_in_words(0.46663), error_in_words(4e-32), error_in_words(math.inf)
    ('0.4666', '0', 'unbounded')
    """
    return f"{round(error, 12):.4g}" if math.isfinite(error) else "unbounded"


def check_budget(budget: float) -> float:
    """Refuse a budget that is no number in (0, 1]."""
    if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 0 < budget <= 1:
        raise InputError(
            f"the budget is {budget!r}, but it is a fraction of vanilla's communication: "
            "choose it in (0, 1]."
        )
    return float(budget)


def _floats(values: Iterable[Any]) -> tuple[float, ...]:
    return tuple(map(float, values))


def _read_certificate(document: dict[str, Any]) -> Certificate:
    numbers = {name: float(value) for name, value in document.items() if name != "iterations"}
    return Certificate(**numbers, iterations=operator.index(document["iterations"]))


def _read_figures(document: dict[str, Any], process: RoundProcess, kept: float) -> dict[str, float]:
    """What a document says of its plan, refused where no such rounds could have it."""
    names = ("rho", "algebraic_connectivity", "consensus_error")
    given = {name: document[name] for name in names if document[name] is not None}
    found = {name: float(decode_number(value)) for name, value in given.items()}
    for name, value in found.items():
        if not value >= -1e-9:  # an eigenvalue of 0 may be rounded below it
            raise PlanError(f"its {name} is {value!r}, but it is never below 0.")
    # Only rounds that diverge have a rho above 1: few, so those alone are computed again.
    rho = found.get("rho", 0.0)
    if rho > 1 + 1e-9 and not math.isclose(theory.contraction(process), rho, rel_tol=1e-6):
        raise PlanError(f"its rho is {rho!r}, which is not that of its rounds.")
    if "consensus_error" in found:
        found["consensus_error"] *= kept
    return found
