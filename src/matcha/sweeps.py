"""Sweeps: a topology planned at several budgets, by several strategies, over several wires."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from numbers import Real
from typing import Any

from matcha._io import encode_number
from matcha._io.tables import Table, data_frame
from matcha._numerics import ProgressCallback
from matcha.errors import InputError, unknown_name
from matcha.plans import Plan, check_budget
from matcha.plans.plan import error_in_words
from matcha.strategies import COMPARED, Alpha, Strategy, comparable, has_budget, plan
from matcha.strategies.registry import look_of
from matcha.timing import Timing, default_timing
from matcha.topology import Topology
from matcha.topology.drawing import axes_or_new
from matcha.topology.families import TopologyLike, as_topology
from matcha.wires import parse_wire
from matcha.wires.wire import budget_over

CYCLE_NOTE = "*: a mean over a cycle of rounds; it does not compare with that of a step."
_METRICS = {
    "consensus_error": "steady-state consensus error",
    "rho": "ρ per iteration (greedy: over its cycle)",
    "algebraic_connectivity": "algebraic connectivity of the expected graph",
    "expected_comm_time": "communication per iteration",
}
_DASHES = ("-", "--", "-.", ":")
DEFAULT_BUDGETS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """What one strategy promises at one budget."""

    strategy: str
    budget: float
    wire: str
    """What messages hold."""
    rho: float
    rho_kind: str
    """`step`, or `cycle` for the mean over one: they do not compare."""
    algebraic_connectivity: float
    expected_comm_time: float
    consensus_error: float | None
    alpha: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The points of a sweep with the plans behind them, by strategy and wire, budgets rising."""

    topology: Topology
    points: tuple[SweepPoint, ...]
    plans: tuple[Plan, ...]

    def __iter__(self) -> Iterator[SweepPoint]:
        return iter(self.points)

    def __len__(self) -> int:
        return len(self.points)

    def of(self, strategy: str, wire: str | None = None) -> tuple[SweepPoint, ...]:
        """The points of one strategy, over one wire or all, budgets rising."""
        return tuple(
            point
            for point in self.points
            if point.strategy == strategy and wire in (None, point.wire)
        )

    @property
    def wires(self) -> tuple[str, ...]:
        """The wires that were swept, in order."""
        return tuple(dict.fromkeys(point.wire for point in self.points))

    def to_frame(self) -> Any:
        """The points as a pandas DataFrame.

        Raises:
            PackageError: pandas is not installed.
        """
        return data_frame(map(asdict, self.points))

    def table(self) -> Table:
        """The points in words; a mean over a cycle, which compares with no step's ρ, has a star."""
        wired = self.wires != ("float32",)
        unit = self.plans[0].timing.unit
        headings = ["strategy", "budget", f"{unit}/iteration", "consensus error", "rho", "weight"]
        rows = [
            [
                point.strategy,
                f"{point.budget:g}",
                f"{point.expected_comm_time:.4g}",
                "–" if point.consensus_error is None else error_in_words(point.consensus_error),
                f"{point.rho:.4f}{'' if point.rho_kind == 'step' else '*'}",
                f"{point.alpha:.4f}",
            ]
            for point in self.points
        ]
        if wired:  # a terminal is narrow, and weights matter least
            headings = ["strategy", "wire", *headings[1:-1]]
            rows = [
                [name, point.wire, *rest[:-1]]
                for point, (name, *rest) in zip(self.points, rows, strict=True)
            ]
        return Table(headings, rows)

    def plot(self, metric: str = "consensus_error", ax: Any = None) -> Any:
        """Draw a line per strategy over the budgets; on given axes or a new figure's, returned.

        Args:
            metric: `consensus_error`, `rho`, or another number of a point.
            ax: Matplotlib's axes.

        Raises:
            PackageError: matplotlib is not installed.
        """
        if metric not in _METRICS:
            raise unknown_name("metric", metric, _METRICS)
        ax = axes_or_new(ax)
        for strategy, wire in dict.fromkeys((point.strategy, point.wire) for point in self):
            known = [
                (point.budget, value)
                for point in self.of(strategy, wire)
                if (value := getattr(point, metric)) is not None
                and math.isfinite(value)
                and (value > 0 or metric != "consensus_error")  # its axis is logarithmic
            ]
            if not known:
                continue
            look = look_of(strategy)
            # A strategy's wires share its colour and marker; dashes tell them apart.
            dashes = _DASHES[self.wires.index(wire) % len(_DASHES)]
            name = strategy if len(self.wires) == 1 else f"{strategy}, {wire}"
            style = {"color": look.color, "marker": look.marker, "ls": dashes, "label": name}
            ax.plot(*zip(*known, strict=True), ms=5, lw=1.8, **style)
            if not has_budget(strategy):
                ax.axhline(known[-1][1], color=look.color, lw=0.8, ls=":")
        if metric == "consensus_error":
            ax.set_yscale("log")
        ax.set_xlabel("communication budget $C_b$")
        ax.set_ylabel(_METRICS[metric])
        ax.grid(alpha=0.25)
        ax.legend(frameon=False)
        return ax

    def __str__(self) -> str:
        return "\n".join([str(self.topology), str(self.table()), *self.notes])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return f"<p>{html.escape(str(self.topology))}</p>{self.table()._repr_html_()}{notes}"

    @property
    def notes(self) -> tuple[str, ...]:
        """What to know when reading the table."""
        cyclic = any(point.rho_kind != "step" for point in self.points)
        return (CYCLE_NOTE,) if cyclic else ()

    def to_json(self) -> dict[str, Any]:
        """The sweep as plain JSON values."""
        points = [{k: encode_number(v) for k, v in asdict(p).items()} for p in self.points]
        return {"topology": self.topology.name, "points": points}


def sweep(
    topology: TopologyLike,
    budgets: float | Sequence[float] = DEFAULT_BUDGETS,
    strategies: str | Strategy | Sequence[str | Strategy] = COMPARED,
    *,
    wires: str | Sequence[str] = ("float32",),
    alpha: Alpha = "error",
    progress: ProgressCallback | None = None,
    **options: Any,
) -> Sweep:
    """Plan a topology at every budget with every strategy.

    Strategies without a budget, as `vanilla`, appear once, at 1.

    Args:
        topology: As for `matcha.plan`.
        budgets: One or several values of C_b in (0, 1].
        strategies: One or several, as for `matcha.plan`: names, or strategies with options.
        wires: One or several names as for `matcha.plan`: what messages hold. The budget counts
            time, so over a smaller wire it buys more rounds; of the budgets that buy all rounds
            only the least is planned.
        alpha: What the weights of strategies that have none of their own are best for: `"error"`,
            by which they are compared, or `"rho"`, as in the paper.
        progress: Called with (done, total, "plans") after each plan.
        options: Passed on to `matcha.plan`: seed, matchings, timing.

    Returns:
        ρ, communication time and consensus error for each point.

    >>> from matcha.topology import families
    >>> points = sweep(families.ring(4), budgets=[0.5, 1.0], strategies=["vanilla", "periodic"])
    >>> [(point.strategy, point.budget) for point in points]
    [('vanilla', 1.0), ('periodic', 0.5), ('periodic', 1.0)]
    """
    if "wire" in options:
        raise InputError("a sweep takes wires=[…], one or several.")
    budgets, strategies, wires = as_sequence(budgets), as_sequence(strategies), as_sequence(wires)
    if not budgets or not strategies or not wires:
        raise InputError("a sweep needs at least one budget, one strategy and one wire.")
    topology = as_topology(topology)
    timing = options.get("timing") or default_timing(topology)
    wanted = combinations(topology, timing, strategies, budgets, wires, alpha)
    plans = []
    for done, (strategy, budget, wire) in enumerate(wanted, start=1):
        plans.append(plan(topology, budget, strategy, wire=wire, **options))
        if progress is not None:
            progress(done, len(wanted), "plans")
    return Sweep(topology=topology, points=tuple(map(point_of, plans)), plans=tuple(plans))


def as_sequence(given: Any) -> Sequence[Any]:
    """What an argument that takes one or several was given, as a sequence.

    >>> as_sequence(0.5), as_sequence("greedy"), as_sequence(["greedy", "vanilla"])
    ((0.5,), ('greedy',), ('greedy', 'vanilla'))
    """
    if isinstance(given, (str, Strategy, Real)) or callable(given):
        return (given,)
    if not isinstance(given, Iterable):
        raise InputError(f"{given!r} was given where one value or a list of several is wanted.")
    return tuple(given)


def combinations(
    topology: Topology,
    timing: Timing,
    strategies: Sequence[str | Strategy],
    budgets: Sequence[float],
    wires: Sequence[str],
    alpha: Alpha = "error",
) -> list[tuple[Strategy, float, str]]:
    """Strategies, budgets and wires that make plans of their own.

    A budget is time: over a small wire all of vanilla's rounds may fit into a fraction of it, and a
    larger budget buys nothing more. An exact average, and silence, have no wire to choose.

    >>> from matcha.timing import Units
    >>> from matcha.topology import families
    >>> found = combinations(families.ring(4), Units(), ["greedy"], [0.1, 0.5, 1.0], ["bfloat16"])
    >>> [(strategy.name, budget) for strategy, budget, _ in found]
    [('greedy', 0.1), ('greedy', 0.5)]
    """
    found = []
    names: set[str] = set()
    for given in strategies:
        strategy = comparable(given, alpha)
        if isinstance(given, str):
            if given in names:
                continue
            names.add(given)
        for wire in strategy.wires(wires, topology):
            enough = False
            for budget in strategy.budgets(budgets):
                check_budget(budget)
                if not enough:
                    found.append((strategy, budget, wire))
                enough = budget_over(topology, timing, parse_wire(wire), budget) >= 1
    return found


def point_of(plan: Plan) -> SweepPoint:
    """What a plan promises, as a point of a sweep."""
    promised = {field.name: getattr(plan, field.name) for field in fields(SweepPoint)}
    return SweepPoint(**{**promised, "wire": plan.wire.name})
