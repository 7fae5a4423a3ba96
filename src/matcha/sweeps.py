"""Sweeps: the same topology planned at several budgets by several strategies (Figures 1c and 3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from matcha.documents import spelled
from matcha.errors import InputError
from matcha.plans import Plan
from matcha.strategies import COMPARED, plan, strategy_named
from matcha.topology import Topology

DEFAULT_BUDGETS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """What one strategy promises at one budget."""

    strategy: str
    budget: float
    rho: float
    rho_kind: str
    """Of one `step`, or the mean over a `cycle`: they do not compare."""
    algebraic_connectivity: float
    expected_comm_time: float
    consensus_error: float | None
    alpha: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The points of a sweep with the plans behind them, strategy by strategy, budgets rising."""

    topology: Topology
    points: tuple[SweepPoint, ...]
    plans: tuple[Plan, ...]

    def __iter__(self) -> Iterator[SweepPoint]:
        return iter(self.points)

    def __len__(self) -> int:
        return len(self.points)

    def of(self, strategy: str) -> tuple[SweepPoint, ...]:
        """The points of one strategy, budgets rising."""
        return tuple(point for point in self.points if point.strategy == strategy)

    def to_json(self) -> dict[str, Any]:
        """The sweep as plain JSON values."""
        points = [{k: spelled(v) for k, v in asdict(p).items()} for p in self.points]
        return {"topology": self.topology.name, "points": points}


def sweep(
    topology: Topology,
    budgets: Sequence[float] = DEFAULT_BUDGETS,
    strategies: Sequence[str] = COMPARED,
    *,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> Sweep:
    """Plan a topology at every budget with every strategy.

    Strategies without a budget, as `vanilla`, appear once, at 1.

    Args:
        topology: The workers and their links.
        budgets: Values of C_b in (0, 1].
        strategies: Names as for `matcha.plan`.
        progress: Called with (plans made, plans in all) after each.
        options: Passed on to `matcha.plan`: seed, mixing, matchings, timing, effort, …

    Returns:
        ρ, communication time and consensus error for each point.

    >>> from matcha.topology import families
    >>> points = sweep(families.ring(4), budgets=[0.5, 1.0], strategies=["vanilla", "periodic"])
    >>> [(point.strategy, point.budget) for point in points]
    [('vanilla', 1.0), ('periodic', 0.5), ('periodic', 1.0)]
    """
    if not budgets or not strategies:
        raise InputError("a sweep needs at least one budget and one strategy.")
    wanted = [
        (strategy, budget)
        for strategy in dict.fromkeys(strategies)
        for budget in strategy_named(strategy).budgets(budgets)
    ]
    plans = []
    for done, (strategy, budget) in enumerate(wanted, start=1):
        plans.append(plan(topology, budget, strategy, **options))
        if progress is not None:
            progress(done, len(wanted))
    return Sweep(topology=topology, points=tuple(map(point_of, plans)), plans=tuple(plans))


def point_of(plan: Plan) -> SweepPoint:
    """What a plan promises, as a point of a sweep."""
    return SweepPoint(
        strategy=plan.strategy,
        budget=plan.budget,
        rho=plan.rho,
        rho_kind=plan.rho_kind,
        algebraic_connectivity=plan.algebraic_connectivity,
        expected_comm_time=plan.expected_comm_time,
        consensus_error=plan.consensus_error,
        alpha=plan.alpha,
    )
