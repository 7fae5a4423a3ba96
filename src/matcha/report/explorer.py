"""The plan explorer: plans that were run, or a topology planned ahead at many budgets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from matcha._numerics import ProgressCallback
from matcha.plans import Plan
from matcha.report.series import short
from matcha.rounds import ONE_WAY
from matcha.strategies import comparable, has_budget, plan, strategy_named, strategy_with
from matcha.topology import Link, Matching, Topology
from matcha.wires import Float, Wire

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
    positions = topology.layout if len(topology.links) <= MAX_LINKS else None
    return {
        "name": topology.name,
        "labels": [str(label) for label in topology.labels],
        "positions": None if positions is None else _page_box(positions, topology),
        "links": [list(link) for link in topology.links] if positions is not None else [],
        "link_seconds": _short_list(topology.link_times) if topology.link_times else None,
        "num_links": len(topology.links),
        "directed": topology.directed,
        "degrees": list(topology.degrees) if positions is not None else [],
        **_stops(topology, plans, strategies, budgets, start, progress),
    }


def _stops(
    topology: Topology,
    plans: Sequence[Plan],
    strategies: Sequence[str],
    budgets: Sequence[float],
    start: Plan | None,
    progress: ProgressCallback | None,
) -> dict[str, Any]:
    series = _series(plans)
    known = {(_name(p, series), _stop(p)): p for p in plans}
    stops = sorted({_stop(p) for p in plans if has_budget(p.strategy)} | set(budgets)) or [1.0]
    whole = known.get(("vanilla", 1.0))
    if strategies:
        wire = plans[0].wire if plans else Float()
        planned = {name: (name, wire) for name in strategies if name not in series}
        order = [*strategies, *series]
        series = {n: both for n in order if (both := (planned | series).get(n)) is not None}
        whole = _explore(topology, plans, series, stops, known, progress)
        series = {name: both for name, both in series.items() if any(n == name for n, _ in known)}
    elif whole is not None and whole.wire != Float():
        whole = None  # budgets are fractions of whole models' time, which was not run
    start = start or next((p for n in ("matcha", "greedy") for p in plans if p.strategy == n), None)
    return {
        "unit": next(iter(known.values())).timing.unit,
        "budgets": stops,
        "vanilla_time": None if whole is None else short(whole.expected_comm_time),
        "strategies": {
            name: [
                None if (made := known.get((name, budget))) is None else _point(made)
                for budget in (stops if has_budget(strategy) else [1.0])
            ]
            for name, (strategy, _) in series.items()
        },
        "start": {
            "strategy": _name(start, series)
            if start
            else "matcha"
            if "matcha" in series
            else next(iter(series)),
            "budget": _start(start, stops),
        },
    }


def _series(plans: Sequence[Plan]) -> dict[str, tuple[str, Wire]]:
    """Strategies by name, with their wire; one that was run over several has a name for each."""
    wires: dict[str, dict[str, Wire]] = {}
    for made in plans:
        wires.setdefault(made.strategy, {})[made.wire.name] = made.wire
    return {
        strategy if len(over) == 1 or wire == Float() else f"{strategy}, {name}": (strategy, wire)
        for strategy, over in wires.items()
        for name, wire in over.items()
    }


def _name(made: Plan, series: Mapping[str, tuple[str, Wire]]) -> str:
    return next(name for name, both in series.items() if both == (made.strategy, made.wire))


def _explore(
    topology: Topology,
    plans: Sequence[Plan],
    series: dict[str, tuple[str, Wire]],
    stops: Sequence[float],
    known: dict[tuple[str, float], Plan],
    progress: ProgressCallback | None,
) -> Plan | None:
    """Plan every strategy at every stop where it was not run; vanilla with whole models."""
    if topology.directed:
        run = {p.strategy for p in plans}
        one_way = [n for n, (s, _) in series.items() if s in run or s == "greedy" or _is_one_way(s)]
        series = {n: series[n] for n in one_way} or {"greedy": ("greedy", Float())}
    # A plan's delay model is of its own messages; over a wire the slider starts from whole ones.
    timing = plans[0].timing if plans and plans[0].wire == Float() else None
    shared = _shared_matchings(plans)
    effort = "default" if topology.num_workers <= CAREFUL_UP_TO else "none"
    for done, budget in enumerate(stops):
        for name, (strategy, wire) in series.items():
            key = (name, budget if has_budget(strategy) else 1.0)
            if key not in known:
                chosen = comparable(strategy_with(strategy, effort=effort))
                small = strategy != "vanilla" and wire.name in chosen.wires([wire.name], topology)
                known[key] = plan(
                    topology,
                    key[1],
                    chosen,
                    matchings=None if strategy == "greedy" else shared,
                    timing=timing if wire == Float() else None,
                    wire=wire if small else Float(),
                )
            if shared is None and strategy == "matcha":
                shared = known[key].matchings
        if progress is not None:
            progress(done + 1, len(stops), "budgets")
    whole = known.get(("vanilla", 1.0))
    if whole is not None and whole.wire != Float():  # run over a wire: budgets are of whole models
        whole = plan(topology, 1.0, comparable("vanilla"), matchings=shared, timing=timing)
    return whole


def _start(start: Plan | None, stops: Sequence[float]) -> float:
    """The stop to open on: the plan's own, or one in the lower middle."""
    if start is not None and _stop(start) in stops:
        return _stop(start)
    return min(stops, key=lambda b: abs(b - 0.3))


def _is_one_way(name: str) -> bool:
    return strategy_named(name).mixings[0] in ONE_WAY


def _point(made: Plan) -> dict[str, Any]:
    """One stop of the slider: the plan's promises and each link's share."""
    activity = made.link_activity
    drawn = len(made.topology.links) <= MAX_LINKS
    colors = _matching_of(made) if drawn and any(activity.values()) else None
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
        "probabilities": _short_list(made.probabilities) if colors else None,
        "matching": colors,
        "activation": _short_list(activity[e] for e in made.topology.links) if drawn else [],
    }


def _matching_of(made: Plan) -> list[int] | None:
    """Each link's matching; None where matchings overlap, so that a link has no single one."""
    number: dict[Link, int] = {}
    for j, matching in enumerate(made.matchings):
        for link in matching:
            if link in number or made.process.is_one_way:
                return None
            number[link] = j
    return [number.get(link, -1) for link in made.topology.links]


def _shared_matchings(plans: Iterable[Plan]) -> tuple[Matching, ...] | None:
    """The decomposition that a run used, if one can be had."""
    return next((p.matchings for p in plans if p.strategy in ("matcha", "single")), None)


def _stop(made: Plan) -> float:
    return float(f"{made.budget:.4g}") if has_budget(made.strategy) else 1.0


def _page_box(
    points: np.ndarray[Any, np.dtype[np.float64]], topology: Topology
) -> list[list[float | int | None]]:
    """Positions in a box of width 1, y downwards. Only a layout of our own may be stretched."""
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
