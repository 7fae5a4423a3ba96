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
from matcha.timing import default_timing
from matcha.topology import Topology
from matcha.topology.drawing import axes_or_new
from matcha.topology.families import TopologyLike, as_topology
from matcha.wires import parse_wire
from matcha.wires.wire import budget_over

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

    @classmethod
    def of(cls, plan: Plan) -> SweepPoint:
        """What a plan promises."""
        promised = {field.name: getattr(plan, field.name) for field in fields(cls)}
        return cls(**{**promised, "wire": plan.wire.name})

    @property
    def rho_in_words(self) -> str:
        """ρ, marked where it is a mean over a cycle: the two kinds do not compare."""
        return f"{self.rho:.4f}{'' if self.rho_kind == 'step' else '*'}"

    @property
    def error_in_words(self) -> str:
        """The consensus error, or a dash where the network is too large for it."""
        return "–" if self.consensus_error is None else error_in_words(self.consensus_error)


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
        return tuple(p for p in self if p.strategy == strategy and wire in (None, p.wire))

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
        columns = {
            "strategy": [p.strategy for p in self],
            "wire": [p.wire for p in self],
            "budget": [f"{p.budget:g}" for p in self],
            f"{self.plans[0].timing.unit}/iteration": [f"{p.expected_comm_time:.4g}" for p in self],
            "consensus error": [p.error_in_words for p in self],
            "rho": [p.rho_in_words for p in self],
            "weight": [f"{p.alpha:.4f}" for p in self],
        }
        # A terminal is narrow, and weights matter least.
        del columns["wire" if self.wires == ("float32",) else "weight"]
        return Table(list(columns), list(zip(*columns.values(), strict=True)))

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
        is_logarithmic = metric == "consensus_error"
        for strategy, wire in dict.fromkeys((point.strategy, point.wire) for point in self):
            values = [(p.budget, getattr(p, metric)) for p in self.of(strategy, wire)]
            known = [
                (budget, value)
                for budget, value in values
                if value is not None and math.isfinite(value) and (value > 0 or not is_logarithmic)
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
        if is_logarithmic:
            ax.set_yscale("log")
        ax.set_xlabel("communication budget $C_b$")
        ax.set_ylabel(_METRICS[metric])
        ax.grid(alpha=0.25)
        ax.legend(frameon=False)
        return ax

    def __str__(self) -> str:
        return "\n".join([str(self.topology), str(self.table()), *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return f"<p>{html.escape(str(self.topology))}</p>{self.table()._repr_html_()}{notes}"

    @property
    def notes(self) -> tuple[str, ...]:
        """What to know when reading the table."""
        return cycle_note(self)

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
    given = [_as_sequence(each) for each in (strategies, budgets, wires)]
    if not all(given):
        raise InputError("a sweep needs at least one budget, one strategy and one wire.")
    topology = as_topology(topology)
    plans = make_plans(topology, *given, alpha=alpha, progress=progress, **options)
    return Sweep(topology=topology, points=tuple(map(SweepPoint.of, plans)), plans=tuple(plans))


def make_plans(
    topology: Topology,
    strategies: Any,
    budgets: Any,
    wires: Any,
    *,
    alpha: Alpha = "error",
    progress: ProgressCallback | None = None,
    **options: Any,
) -> list[Plan]:
    """A plan per strategy, budget and wire that make one of their own; of each one or several.

    A budget is time: over a small wire all of vanilla's rounds may fit into a fraction of it, and a
    larger budget buys nothing more. An exact average, and silence, have no wire to choose.

    >>> from matcha.topology import families
    >>> plans = make_plans(families.ring(4), "greedy", [0.1, 0.5, 1.0], "bfloat16")
    >>> [(plan.strategy, plan.budget) for plan in plans]
    [('greedy', 0.1), ('greedy', 0.5)]
    """
    timing = options.get("timing") or default_timing(topology)
    strategies, budgets, wires = map(_as_sequence, (strategies, budgets, wires))
    wanted = []
    for place, given in enumerate(strategies):
        if isinstance(given, str) and given in strategies[:place]:
            continue
        strategy = comparable(given, alpha)
        for wire in strategy.wires(wires, topology):
            enough = False
            for budget in strategy.budgets(budgets):
                check_budget(budget)
                if not enough:
                    wanted.append((budget, strategy, wire))
                enough = budget_over(topology, timing, parse_wire(wire), budget) >= 1
    plans = []
    for budget, strategy, wire in wanted:
        plans.append(plan(topology, budget, strategy, wire=wire, **options))
        if progress is not None:
            progress(len(plans), len(wanted), "plans")
    return plans


def _as_sequence(given: Any) -> Sequence[Any]:
    """What an argument that takes one or several was given, as a sequence.

    >>> _as_sequence(0.5), _as_sequence("greedy"), _as_sequence(["greedy", "vanilla"])
    ((0.5,), ('greedy',), ('greedy', 'vanilla'))
    """
    if isinstance(given, (str, Strategy, Real)) or callable(given):
        return (given,)
    if not isinstance(given, Iterable):
        raise InputError(f"{given!r} was given where one value or a list of several is wanted.")
    return tuple(given)


def cycle_note(points: Iterable[SweepPoint]) -> tuple[str, ...]:
    """What to say below a table of points whose ρ do not all compare."""
    cyclic = any(point.rho_kind != "step" for point in points)
    note = "*: a mean over a cycle of rounds; it does not compare with that of a step."
    return (note,) if cyclic else ()
