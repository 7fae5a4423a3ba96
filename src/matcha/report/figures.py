"""Figures for papers and `--plot`: topologies and sweeps, drawn with matplotlib.

Figures are objects, never pyplot state: drawing one leaves nothing behind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matcha._io import replace_file
from matcha.errors import InputError, require
from matcha.plans import Plan
from matcha.report.layouts import layout
from matcha.report.styles import look_of
from matcha.strategies import has_budget
from matcha.sweeps import Sweep
from matcha.topology import Link
from matcha.tuning import Tuning

FORMATS = (".png", ".svg", ".pdf")
# Okabe and Ito's palette: told apart by colour-blind readers too.
PALETTE = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31",
    "#7B4173", "#637939",
)  # fmt: skip
_DASHES = ("-", "--", "-.", ":")


def check_format(path: str | Path) -> Path:
    """Refuse, before any work, a figure file that we cannot draw.

    Raises:
        InputError: Names the endings that are possible.
        PackageError: matplotlib is not installed.
    """
    if Path(path).suffix.lower() not in FORMATS:
        raise InputError(f"cannot draw {str(path)!r}: figures end in {', '.join(FORMATS)}.")
    require("matplotlib")
    return Path(path)


def link_activity(plan: Plan) -> dict[Link, float]:
    """How often each link is used, in exchanges an iteration; in messages, of a one-way link."""
    activity = dict.fromkeys(plan.topology.links, 0.0)
    # Where links carry both ways a message is half an exchange, whichever way it goes.
    part = 0.5 if plan.process.is_one_way and not plan.topology.directed else 1.0
    for matching, p in zip(plan.matchings, plan.probabilities, strict=True):
        for i, j in matching:
            activity[(i, j) if (i, j) in activity else (j, i)] += part * p
    return activity


def draw_topology(plan: Plan) -> Any:
    """The topology coloured by matching, line width by activation probability (Figure 1a).

    Where matchings overlap (`greedy`), width and shade both show how often a link is used.
    """
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    topology, activity = plan.topology, link_activity(plan)
    color_of, legend = _link_colors(plan, activity)
    points = layout(topology)
    crowded = topology.num_workers > 64
    figure = Figure(figsize=(6.4, 5.2), layout="constrained")
    axes = figure.add_subplot()
    most = max(max(activity.values()), 1e-12)
    axes.add_collection(
        LineCollection(
            [points[list(link)] for link in topology.links],
            colors=[color_of[link] for link in topology.links],
            linewidths=[
                (0.4 if crowded else 0.8) + 5.2 * activity[e] / most for e in topology.links
            ],
            capstyle="round",
            alpha=0.9,
        )
    )
    if topology.directed and not crowded:
        for i, j in topology.links:
            head = points[i] + 0.72 * (points[j] - points[i])
            tail = points[i] + 0.70 * (points[j] - points[i])
            axes.annotate("", head, tail, arrowprops={"arrowstyle": "-|>", "color": "0.25"})
    axes.scatter(
        points[:, 0],
        points[:, 1],
        s=12 if crowded else 300,
        c="white",
        edgecolors="#333333",
        zorder=3,
    )
    if not crowded:
        for (x, y), label in zip(points, topology.labels, strict=True):
            axes.text(x, y, str(label), ha="center", va="center", fontsize=9, zorder=4)
    handles = [Line2D([], [], color=color, lw=3, label=label) for color, label in legend]
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    axes.set_title(
        f"{topology.name} · {plan.strategy} at budget {plan.budget:g} · ρ = {plan.rho:.4f}",
        fontsize=11,
    )
    axes.set_aspect("equal")
    axes.margins(0.08)
    axes.set_axis_off()
    return figure


def draw_sweep(sweep: Sweep) -> Any:
    """ρ, and the steady-state consensus error where it is known, against the budget."""
    from matplotlib.figure import Figure

    panels = [("rho", "ρ per iteration (greedy: over its cycle)", False)]
    if any(point.consensus_error is not None for point in sweep):
        panels.insert(0, ("consensus_error", "steady-state consensus error", True))
    figure = Figure(figsize=(5.2 * len(panels), 4.0), layout="constrained")
    for number, (quantity, title, logarithmic) in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), number)
        for strategy, wire in dict.fromkeys((point.strategy, point.wire) for point in sweep):
            _draw_strategy(axes, sweep, strategy, wire, quantity)
        if logarithmic:
            axes.set_yscale("log")
        axes.set_xlabel("communication budget $C_b$")
        axes.set_ylabel(title)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
    figure.suptitle(sweep.topology.name, fontsize=11)
    return figure


def _draw_strategy(axes: Any, sweep: Sweep, strategy: str, wire: str, quantity: str) -> None:
    known = [p for p in sweep.of(strategy, wire) if _is_drawable(getattr(p, quantity), quantity)]
    if not known:
        return
    color, marker, *_ = look_of(strategy)
    budgets = [point.budget for point in known]
    values = [getattr(point, quantity) for point in known]
    # A strategy's wires share its colour and marker; dashes tell them apart.
    dashes = _DASHES[sweep.wires.index(wire) % len(_DASHES)]
    name = strategy if len(sweep.wires) == 1 else f"{strategy}, {wire}"
    axes.plot(budgets, values, color=color, marker=marker, ms=5, lw=1.8, ls=dashes, label=name)
    if not has_budget(strategy):
        axes.axhline(values[-1], color=color, lw=0.8, ls=":")


def draw_tuning(tuning: Tuning) -> Any:
    """Time per iteration against consensus error: seconds to the target, the best marked."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axis = figure.add_subplot()
    for strategy, wire in dict.fromkeys((p.strategy, p.wire) for p in tuning.points):
        mine = [p for p in tuning.points if (p.strategy, p.wire) == (strategy, wire)]
        mine = [p for p in mine if 0 < p.consensus_error < math.inf]
        axis.plot(
            [p.iteration_seconds for p in mine],
            [p.consensus_error for p in mine],
            color=look_of(strategy).color,
            marker=look_of(strategy).marker,
            markersize=4,
            alpha=1.0 if wire == tuning.best.wire else 0.35,
            label=strategy if wire == tuning.best.wire else None,
        )
        for p in mine if wire == tuning.best.wire else ():
            axis.annotate(
                f"{p.seconds:.3g} s" if math.isfinite(p.seconds) else "never",
                (p.iteration_seconds, p.consensus_error),
                textcoords="offset points",
                xytext=(5, 4),
                fontsize=7,
            )
    axis.plot(
        [tuning.best.iteration_seconds],
        [tuning.best.consensus_error],
        "*",
        markersize=16,
        color="black",
        label=f"best: {tuning.best.label}",
    )
    axis.set_yscale("log")
    axis.set_xlabel("time per iteration (s)")
    axis.set_ylabel("steady-state consensus error")
    axis.set_title(f"{tuning.topology.name}: time to the target; other wires pale")
    axis.legend()
    return figure


def _is_drawable(value: float | None, quantity: str) -> bool:
    """Whether a value has a place on its axis: the error's is logarithmic."""
    if value is None or not math.isfinite(value):
        return False
    return quantity == "rho" or value > 0


def save_figure(figure: Any, path: str | Path) -> None:
    """Write a figure; the ending of the file says the format."""
    target = check_format(path)
    with replace_file(target) as partial:
        figure.savefig(partial, format=target.suffix[1:].lower(), dpi=160)


def _link_colors(
    plan: Plan, activity: Mapping[Link, float]
) -> tuple[dict[Link, Any], list[tuple[Any, str]]]:
    """A colour for each link, and what the colours mean."""
    if len(plan.matchings) <= len(PALETTE) * 2 and not _overlap(plan):
        colors = [_palette(j) for j in range(len(plan.matchings))]
        legend = [
            (color, f"matching {j + 1}: p = {p:.2f}")
            for j, (color, p) in enumerate(zip(colors, plan.probabilities, strict=True))
        ]
        return {e: colors[j] for j, links in enumerate(plan.matchings) for e in links}, legend
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    shade = colormaps["viridis_r"]
    most = max(max(activity.values()), 1e-12)
    steps = (0.25, 0.5, 0.75, 1.0)
    legend = [(to_hex(shade(0.1 + 0.9 * s)), f"{s * most:.2g} exchanges/iteration") for s in steps]
    return {e: to_hex(shade(0.1 + 0.9 * a / most)) for e, a in activity.items()}, legend


def _overlap(plan: Plan) -> bool:
    links = [link for matching in plan.matchings for link in matching]
    return len(links) != len(set(links)) or not set(links) <= set(plan.topology.links)


def _palette(j: int) -> Any:
    if j < len(PALETTE):
        return PALETTE[j]
    from matplotlib.colors import to_rgb

    r, g, b = to_rgb(PALETTE[j % len(PALETTE)])
    return (0.5 + r / 2, 0.5 + g / 2, 0.5 + b / 2)
