"""Tuned points: plans with the time that each takes to the target, and the best of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from matcha._io.tables import Table
from matcha.plans import OuterStep, Plan
from matcha.strategies import with_budget
from matcha.topology import Topology
from matcha.tuning.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedPoint:
    """One plan and when its average model reaches the target."""

    strategy: str
    budget: float
    wire: str
    """What messages hold."""
    rho: float
    consensus_error: float
    drift_error: float
    comm_seconds: float
    """Communication per iteration."""
    iteration_seconds: float
    learning_rate: float | None
    """The rate at which the target is reached soonest; None where trials have the task's own."""
    iterations: float
    seconds: float
    """Seconds to the target: predicted, inferred from others' trials, or tried; inf for never."""
    proved: bool
    """Whether the rate is within what Theorem 2 allows for this ρ."""
    rate_factor: float | None = None
    """What to multiply the best learning rate of exact averaging by: tried, or by theory for SGD;
    None where neither says."""
    outer: OuterStep | None = None
    """What follows each round."""
    tried: bool = False
    """Whether iterations were measured by training."""

    @property
    def label(self) -> str:
        """Strategy, budget, wire and outer step in a few letters."""
        name = with_budget(self.strategy, self.budget)
        name = name if self.wire == "float32" else f"{name} {self.wire}"
        step = self.outer
        return name if step is None else f"{name} outer {step.rate:g}/{step.momentum:g}"


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """All points, the best of them, and its plan."""

    topology: Topology
    problem: Problem
    compute_time: float
    overlap: bool
    points: tuple[TunedPoint, ...]
    best: TunedPoint
    plan: Plan = field(repr=False)

    @property
    def num_tried(self) -> int:
        """Plans whose iterations were measured."""
        return sum(point.tried for point in self.points)

    def reasons(self) -> tuple[str, ...]:
        """Why the best point is the best, in sentences."""
        best = self.best
        rate = "" if best.learning_rate is None else f", at learning rate {best.learning_rate:.4g}"
        factor = best.rate_factor
        if factor is not None and not (best.tried and factor == 1.0):
            share = f"{factor:.2g}"
            if not rate:
                rate = f"; use {share} of the learning rate"
            else:
                rate += f", {'the same as' if share == '1' else f'{share} of'} exact averaging's"
        how = "reached" if best.tried else "is predicted to reach"
        lines = [
            f"{best.label}: the average model {how} the target after about "
            f"{best.iterations:.0f} iterations of {best.iteration_seconds:.4g} s, "
            f"{best.seconds:.4g} s in all{rate}."
        ]
        lines += [line for line in (self._richer(), self._poorer(), self._heavier()) if line]
        if self.num_tried:
            lines.append(
                f"{self.num_tried} of {len(self.points)} plans were tried, one seed each; the "
                "others' iterations are inferred from them."
            )
        elif not best.proved:
            lines.append(
                "The learning rate is above what Theorem 2 allows for this rho; its bound is a "
                "worst case, and the prediction here is of the average."
            )
        return tuple(lines)

    def _beside(self, is_beside: Callable[[TunedPoint], bool]) -> list[TunedPoint]:
        """Points of the best's strategy, least seconds first."""
        same = [p for p in self.points if p.strategy == self.best.strategy and is_beside(p)]
        return sorted(same, key=lambda p: p.seconds)

    def _richer(self) -> str | None:
        best = self.best
        found = self._beside(lambda p: p.wire == best.wire and p.budget > best.budget)
        if not found:
            return None
        p = min(found, key=lambda p: p.budget)
        fewer = 100 * (1 - p.iterations / best.iterations)
        return (
            f"More communication (budget {p.budget:g}) "
            + (f"saves {fewer:.0f} % of the iterations" if fewer >= 0.5 else "saves no iterations")
            + f", but each takes {100 * (p.iteration_seconds / best.iteration_seconds - 1):.0f} % "
            "longer."
        )

    def _poorer(self) -> str | None:
        best = self.best
        found = self._beside(lambda p: p.wire == best.wire and p.budget < best.budget)
        if not found:
            return None
        p = max(found, key=lambda p: p.budget)
        more = 100 * (p.iterations / best.iterations - 1)
        return (
            f"Less communication (budget {p.budget:g}) makes iterations "
            f"{100 * (1 - p.iteration_seconds / best.iteration_seconds):.0f} % shorter, but "
            + (f"needs {more:.0f} % more of them." if math.isfinite(more) else "never gets there.")
        )

    def _heavier(self) -> str | None:
        """What whole messages would take, where smaller ones won."""
        best = self.best
        found = self._beside(lambda p: p.wire == "float32")
        if best.wire == "float32" or not found or not math.isfinite(found[0].seconds):
            return None
        return (
            f"With whole float32 messages the best is {found[0].label}: "
            f"{found[0].seconds / best.seconds:.2f} times as long."
        )

    def table(self, limit: int = 24) -> str:
        """The soonest points as text, by strategy and wire, the best one marked."""
        shown = set(sorted(self.points, key=lambda p: p.seconds)[:limit]) | {self.best}
        rows = [
            [
                f"{'*' if p == self.best else ' '} {p.label}",
                f"{p.consensus_error:.4g}",
                f"{p.iteration_seconds:.4g}",
                "–" if p.learning_rate is None else f"{p.learning_rate:.3g}",
                f"{p.iterations:.0f}",
                f"{p.seconds:.4g}",
                *(["yes" if p.tried else ""] if self.num_tried else []),
            ]
            for p in self.points
            if p in shown
        ]
        headings = ["  plan", "error", "s/iter", "rate", "iterations", "seconds"]
        headings += ["tried"] if self.num_tried else []
        lines = [str(Table(headings, rows))]
        left = len(self.points) - len(shown)
        lines += [f"  and {left} that take longer"] if left else []
        return "\n".join([*lines, *self.reasons()])

    def __repr__(self) -> str:
        return f"{self.topology}\n{self.table()}"

    def to_json(self) -> dict[str, Any]:
        """The tuning as plain JSON values; infinities become null."""

        def plain(point: TunedPoint) -> dict[str, Any]:
            return {
                name: None if isinstance(value, float) and not math.isfinite(value) else value
                for name, value in asdict(point).items()
            }

        return {
            "topology": self.topology.name,
            "compute_time": self.compute_time,
            "tried": self.num_tried,
            "overlap": self.overlap,
            "problem": asdict(self.problem),
            "best": plain(self.best),
            "reasons": list(self.reasons()),
            "points": [plain(point) for point in self.points],
        }
