"""The plan explorer: plans that were run, or a topology planned ahead at many budgets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from matcha._numerics import ProgressCallback
from matcha.plans import Plan
from matcha.plans.drawing import matching_of
from matcha.report.series import short
from matcha.rounds import ONE_WAY
from matcha.strategies import comparable, has_budget, plan, strategy_named, strategy_with
from matcha.topology import Topology
from matcha.wires import Float

# Beyond this a drawing is a hairball and its numbers would fill the page.
MAX_LINKS = 2_000
# Above this the search for a better cycle takes seconds per stop and moves ρ by a few per cent.
CAREFUL_UP_TO = 32


def network(
    topology: Topology,
    plans: Sequence[Plan] = (),
    *,
    strategies: Sequence[str] = (),
    budgets: Sequence[float] = (),
    start: Plan | None = None,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """What the page needs to draw a topology, its plans, and a slider over their budgets.

    Without strategies, only the plans that were run are shown. With strategies, each is planned at
    each budget; one decomposition serves all stops, so that a colour means the same matching at
    every budget, and the plans of real runs are shown as they were. The page opens on `start`; by
    default on a run's plan, `matcha`'s before others'.
    """
    order = list(dict.fromkeys(made.strategy for made in plans))
    known: dict[str, dict[float, Plan]] = {}
    for made in sorted(plans, key=lambda made: order.index(made.strategy)):
        known.setdefault(_name(made, plans), {})[_stop(made)] = made
    stops = sorted({_stop(p) for p in plans if has_budget(p.strategy)} | set(budgets)) or [1.0]
    whole = known.get("vanilla", {}).get(1.0)
    if strategies:
        whole = _explore(topology, plans, strategies, stops, known, progress)
    elif whole is not None and whole.wire != Float():
        whole = None  # budgets are fractions of whole models' time, which was not run
    start = start or next((p for n in ("matcha", "greedy") for p in plans if p.strategy == n), None)
    shown = [*dict.fromkeys([*strategies, *known])]
    drawn = len(topology.links) <= MAX_LINKS
    return {
        "name": topology.name,
        "labels": [str(label) for label in topology.labels],
        "positions": _page_box(topology) if drawn else None,
        "links": [list(link) for link in topology.links] if drawn else [],
        "link_seconds": _short_list(topology.link_times) if topology.link_times else None,
        "num_links": len(topology.links),
        "directed": topology.directed,
        "degrees": list(topology.degrees) if drawn else [],
        "unit": next(made.timing.unit for at in known.values() for made in at.values()),
        "budgets": stops,
        "vanilla_time": None if whole is None else short(whole.expected_comm_time),
        "strategies": {name: _points(known[name], stops) for name in shown if name in known},
        "start": {
            "strategy": _name(start, plans)
            if start
            else "matcha"
            if "matcha" in known
            else next(name for name in shown if name in known),
            # The start's own stop, or one in the lower middle.
            "budget": _stop(start)
            if start is not None and _stop(start) in stops
            else min(stops, key=lambda budget: abs(budget - 0.3)),
        },
    }


def _name(made: Plan, plans: Sequence[Plan]) -> str:
    """A plan's strategy; one that was run over several wires has a name for each."""
    wires = {other.wire.name for other in plans if other.strategy == made.strategy}
    coded = len(wires) > 1 and made.wire != Float()
    return f"{made.strategy}, {made.wire.name}" if coded else made.strategy


def _stop(made: Plan) -> float:
    return float(f"{made.budget:.4g}") if has_budget(made.strategy) else 1.0


def _explore(
    topology: Topology,
    plans: Sequence[Plan],
    strategies: Sequence[str],
    stops: Sequence[float],
    known: dict[str, dict[float, Plan]],
    progress: ProgressCallback | None,
) -> Plan | None:
    """Plan every strategy at every stop where it was not run; vanilla with whole models."""
    wire = plans[0].wire if plans else Float()
    series = {name: (name, wire) for name in strategies}
    for name, at in known.items():
        made = next(iter(at.values()))
        series[name] = (made.strategy, made.wire)
    if topology.directed:
        able = {"greedy", *(made.strategy for made in plans)}
        one_way = {
            name: (strategy, wire)
            for name, (strategy, wire) in series.items()
            if strategy in able or strategy_named(strategy).mixings[0] in ONE_WAY
        }
        series = one_way or {"greedy": ("greedy", Float())}
    # A plan's delay model is of its own messages; over a wire the slider starts from whole ones.
    timing = plans[0].timing if plans and plans[0].wire == Float() else None
    # The decomposition that a run used, if one can be had.
    shared = next((p.matchings for p in plans if p.strategy in ("matcha", "single")), None)
    effort = "default" if topology.num_workers <= CAREFUL_UP_TO else "none"
    for done, stop in enumerate(stops, start=1):
        for name, (strategy, wire) in series.items():
            at, budget = known.setdefault(name, {}), stop if has_budget(strategy) else 1.0
            if budget not in at:
                chosen = comparable(strategy_with(strategy, effort=effort))
                small = strategy != "vanilla" and wire.name in chosen.wires([wire.name], topology)
                at[budget] = plan(
                    topology,
                    budget,
                    chosen,
                    matchings=None if strategy == "greedy" else shared,
                    timing=timing if wire == Float() else None,
                    wire=wire if small else Float(),
                )
            if shared is None and strategy == "matcha":
                shared = at[budget].matchings
        if progress is not None:
            progress(done, len(stops), "budgets")
    whole = known.get("vanilla", {}).get(1.0)
    if whole is not None and whole.wire != Float():  # run over a wire: budgets are of whole models
        whole = plan(topology, 1.0, comparable("vanilla"), matchings=shared, timing=timing)
    return whole


def _points(at: dict[float, Plan], stops: Sequence[float]) -> list[dict[str, Any] | None]:
    """A strategy's stops of the slider; None where there is no plan."""
    strategy = next(iter(at.values())).strategy
    budgets = stops if has_budget(strategy) else [1.0]
    return [_point(at[budget]) if budget in at else None for budget in budgets]


def _point(made: Plan) -> dict[str, Any]:
    """One stop of the slider: the plan's promises and each link's share."""
    activity = made.link_activity
    drawn = len(made.topology.links) <= MAX_LINKS
    matchings = None
    if drawn and any(activity.values()) and not made.process.is_one_way:
        matchings = matching_of(made.process)
    return {
        "budget": short(made.budget),
        "rho": short(made.rho),
        "rho_kind": made.rho_kind,
        "error": short(made.consensus_error),
        "time": short(made.expected_comm_time),
        "alpha": short(made.alpha),
        "mixing": made.mixing,
        "averages": made.mixing == "average",
        "omega": None if made.omega is None else _short_list(made.omega),
        "probabilities": _short_list(made.probabilities) if matchings else None,
        "matching": matchings and [matchings.get(link, -1) for link in made.topology.links],
        "activation": _short_list(activity[e] for e in made.topology.links) if drawn else [],
    }


def _page_box(topology: Topology) -> list[list[float | int | None]]:
    """Positions in a box of width 1, y downwards. Only a layout of our own may be stretched."""
    points: npt.NDArray[np.float64] = topology.layout
    low, size = points.min(axis=0), np.maximum(np.ptp(points, axis=0), 1e-9)
    if topology.positions is None and size.min() > 0.3 * size.max():
        scaled = (points - low) / size * [1.0, 0.8]
    else:
        scaled = (points - low) / size.max()
    height = float(scaled[:, 1].max())
    return [[short(float(x), 4), short(height - float(y), 4)] for x, y in scaled]


def _short_list(values: Iterable[float]) -> list[float | int | None]:
    # The optimum leaves crumbs of 1e-9 on matchings that it does not use.
    return [short(v, 4) if abs(v) > 1e-6 else 0 for v in values]
