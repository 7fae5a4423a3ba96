"""Tuned points: plans with the time that each takes to the target, and the best of them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
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
    """To the target: predicted, inferred from others' trials, or tried; inf for never."""
    proved: bool
    """Whether the rate is within what Theorem 2 allows for this ρ."""
    rate_factor: float | None = None
    """What to multiply the best learning rate of exact averaging by: tried, or by theory for SGD;
    None where neither says."""
    outer: OuterStep | None = None
    """What follows each round."""
    tried: bool = False
    """Whether iterations were measured by training."""
    plan: Plan = field(repr=False, compare=False)

    @property
    def seconds(self) -> float:
        """Seconds to the target; inf for never."""
        return self.iterations * self.iteration_seconds

    @property
    def label(self) -> str:
        """Strategy, budget, wire and outer step in a few letters."""
        name = with_budget(self.strategy, self.budget)
        name = name if self.wire == "float32" else f"{name} {self.wire}"
        step = self.outer
        return name if step is None else f"{name} outer {step.rate:g}/{step.momentum:g}"

    def to_json(self) -> dict[str, Any]:
        """The point without its plan, as plain JSON values; infinities become null."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.repr}
        values |= {"seconds": self.seconds, "outer": self.outer and asdict(self.outer)}
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }


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
        how = "reached" if best.tried else "is predicted to reach"
        lines = [
            f"{best.label}: the average model {how} the target after about "
            f"{best.iterations:.0f} iterations of {best.iteration_seconds:.4g} s, "
            f"{best.seconds:.4g} s in all{self._rate()}.",
            *self._neighbors(),
        ]
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

    def _rate(self) -> str:
        """At which learning rate."""
        best, factor = self.best, self.best.rate_factor
        rate = "" if best.learning_rate is None else f", at learning rate {best.learning_rate:.4g}"
        if factor is None or (best.tried and factor == 1.0):
            return rate
        share = f"{factor:.2g}"
        if not rate:
            return f"; use {share} of the learning rate"
        return f"{rate}, {'the same as' if share == '1' else f'{share} of'} exact averaging's"

    def _neighbors(self) -> list[str]:
        """What more or less communication, or whole messages, would do to the best's strategy."""
        best, lines = self.best, []
        same = [point for point in self.points if point.strategy == best.strategy]
        same.sort(key=lambda p: p.seconds)
        wired = [point for point in same if point.wire == best.wire]
        richer = [point for point in wired if point.budget > best.budget]
        poorer = [point for point in wired if point.budget < best.budget]
        whole = [point for point in same if point.wire == "float32" != best.wire]
        if richer:
            p = min(richer, key=lambda p: p.budget)
            fewer = 100 * (1 - p.iterations / best.iterations)
            lines.append(
                f"More communication (budget {p.budget:g}) saves "
                + (f"{fewer:.0f} % of the iterations" if fewer >= 0.5 else "no iterations")
                + ", but each takes "
                f"{100 * (p.iteration_seconds / best.iteration_seconds - 1):.0f} % longer."
            )
        if poorer:
            p = max(poorer, key=lambda p: p.budget)
            more = 100 * (p.iterations / best.iterations - 1)
            lines.append(
                f"Less communication (budget {p.budget:g}) makes iterations "
                f"{100 * (1 - p.iteration_seconds / best.iteration_seconds):.0f} % shorter, but "
                + (f"needs {more:.0f} % more of them." if more < math.inf else "never gets there.")
            )
        if whole and math.isfinite(whole[0].seconds):
            lines.append(
                f"With whole float32 messages the best is {whole[0].label}: "
                f"{whole[0].seconds / best.seconds:.2f} times as long."
            )
        return lines

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
        return {
            "topology": self.topology.name,
            "compute_time": self.compute_time,
            "tried": self.num_tried,
            "overlap": self.overlap,
            "problem": asdict(self.problem),
            "best": self.best.to_json(),
            "reasons": list(self.reasons()),
            "points": [point.to_json() for point in self.points],
        }
