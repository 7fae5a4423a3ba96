"""The plan explorer: a topology planned ahead at many budgets, for the page's slider."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from matcha.plans import Plan
from matcha.report.figures import link_activity
from matcha.report.layouts import layout
from matcha.report.series import short
from matcha.rounds import ONE_WAY
from matcha.strategies import COMPARED, has_budget, plan, strategy_named, strategy_with
from matcha.topology import Link, Matching, Topology
from matcha.wires import Float

BUDGETS = (0.02, *(round(0.05 * i, 2) for i in range(1, 21)))
# Beyond this a drawing is a hairball and its numbers would fill the page.
MAX_LINKS = 2_000
# Above this the search for a better cycle takes seconds a stop and moves ρ by a few per cent.
CAREFUL_UP_TO = 32


def network(
    topology: Topology,
    plans: Sequence[Plan] = (),
    *,
    strategies: Sequence[str] = COMPARED,
    budgets: Sequence[float] = BUDGETS,
    start: Plan | None = None,
    seconds: float = 20.0,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """What the page needs to draw a topology and move its budget slider.

    One decomposition serves the whole slider, so that a colour means the same matching at every
    budget; the plans of real runs are shown as they were.

    Args:
        topology: The workers and their links.
        plans: Plans that were run; they stand in the sweep at their own budgets.
        strategies: What to plan beside them.
        budgets: The slider's stops. The runs' own are added.
        start: The plan to open on; by default a run's, MATCHA's before others'.
        seconds: Stop planning after this long; the stops made by then are spread evenly.
        progress: Called with (stops made, stops in all).
    """
    positions = layout(topology) if len(topology.links) <= MAX_LINKS else None
    return {
        "name": topology.name,
        "labels": [str(label) for label in topology.labels],
        "positions": None if positions is None else _page_box(positions, topology),
        "links": [list(link) for link in topology.links] if positions is not None else [],
        "link_seconds": _short_list(topology.link_times) if topology.link_times else None,
        "num_links": len(topology.links),
        "directed": topology.directed,
        "degrees": list(topology.degrees) if positions is not None else [],
        **_sweep(topology, plans, strategies, budgets, start, seconds, progress),
    }


def _sweep(
    topology: Topology,
    plans: Sequence[Plan],
    strategies: Sequence[str],
    budgets: Sequence[float],
    start: Plan | None,
    seconds: float,
    progress: Callable[[int, int], None] | None,
) -> dict[str, Any]:
    known = {(p.strategy, _stop(p)): p for p in plans}
    names = [*strategies, *(p.strategy for p in plans if p.strategy not in strategies)]
    names = list(dict.fromkeys(names))
    if topology.directed:
        run = {p.strategy for p in plans}
        names = [n for n in names if n in run or n == "greedy" or _is_one_way(n)]
        names = names or ["greedy"]
    own = {_stop(p) for p in plans if has_budget(p.strategy)}
    stops = [*sorted(own), *_coarse_to_fine(sorted(set(budgets) - own))]
    # A plan's delay model is of its own messages; over a wire the slider starts from whole ones.
    wire = plans[0].wire if plans else Float()
    timing = plans[0].timing if plans and wire == Float() else None
    shared = _shared_matchings(plans)
    deadline = time.monotonic() + seconds
    made: set[float] = set()
    for done, budget in enumerate(stops):
        if made and time.monotonic() > deadline:
            break
        for name in names:
            key = (name, budget if has_budget(name) else 1.0)
            if key not in known:
                own_matchings = None if name == "greedy" else shared
                known[key] = plan(
                    topology,
                    key[1],
                    strategy_with(
                        name, effort="default" if topology.num_workers <= CAREFUL_UP_TO else "none"
                    ),
                    matchings=own_matchings,
                    timing=timing,
                    wire=wire if name != "vanilla" and strategy_named(name).takes_wire else Float(),
                )
            if shared is None and name == "matcha":
                shared = known[key].matchings
        made.add(budget)
        if progress is not None:
            progress(done + 1, len(stops))
    shown = sorted(made)
    whole = known.get(("vanilla", 1.0))
    if whole is not None and whole.wire != Float():  # run over a wire: budgets are of whole models
        whole = plan(topology, 1.0, "vanilla", matchings=shared, timing=timing)
    start = start or next((p for n in ("matcha", "greedy") for p in plans if p.strategy == n), None)
    return {
        "unit": next(iter(known.values())).timing.unit,
        "budgets": shown,
        "vanilla_time": None if whole is None else short(whole.expected_comm_time),
        "strategies": {
            name: [
                _point(known[name, budget if has_budget(name) else 1.0])
                for budget in (shown if has_budget(name) else [1.0])
            ]
            for name in names
        },
        "start": {
            "strategy": start.strategy if start else "matcha" if "matcha" in names else names[0],
            "budget": _stop(start) if start else min(shown, key=lambda b: abs(b - 0.3)),
        },
    }


def _is_one_way(name: str) -> bool:
    return strategy_named(name).mixings[0] in ONE_WAY


def _point(made: Plan) -> dict[str, Any]:
    """One stop of the slider: the plan's promises and each link's share."""
    activity = link_activity(made)
    drawn = len(made.topology.links) <= MAX_LINKS
    colors = _matching_of(made) if drawn else None
    return {
        "rho": short(made.rho),
        "rho_kind": made.rho_kind,
        "error": short(made.consensus_error),
        "time": short(made.expected_comm_time),
        "alpha": short(made.alpha),
        "mixing": made.mixing,
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


def _coarse_to_fine(values: Sequence[float]) -> Iterator[float]:
    """The values in an order whose every prefix is spread out: ends first, then bisecting."""
    if not values:
        return
    yield values[-1]
    step, last = len(values), len(values) - 1
    seen = {last}
    while step >= 1:
        for i in range(0, last, step):
            if i not in seen:
                seen.add(i)
                yield values[i]
        step //= 2


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
