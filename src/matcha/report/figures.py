"""Figures for papers and `--plot`, drawn with matplotlib: topologies, sweeps, tuning, runs.

Figures are objects, never pyplot state: drawing one leaves nothing behind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from matcha._io import replace_file
from matcha.errors import InputError, require
from matcha.plans import Plan
from matcha.records import Run
from matcha.report.groups import label_runs
from matcha.report.series import KINDS, curves, timeline, worker_loads
from matcha.report.styles import LOOKS, look_of
from matcha.report.summary import compare, diverged_at
from matcha.strategies import has_budget
from matcha.sweeps import Sweep
from matcha.topology import Link, Topology
from matcha.tuning import Tuning

Points = npt.NDArray[np.float64]
_CAREFUL = 64
"""Up to this many workers several layouts are tried and the clearest is kept."""
_NEAR = 0.11
"""A link that passes a worker closer than this (in a unit square) looks attached to it."""


def layout(topology: Topology) -> Points:
    """A point for each worker: the topology's own, or one that shows its structure."""
    if topology.positions is not None:
        return np.array(topology.positions, dtype=np.float64)
    import networkx as nx

    graph = nx.Graph(topology.links)
    if topology.num_workers > _CAREFUL:
        return _array(nx.spring_layout(graph, seed=0, iterations=50), topology)
    candidates = [nx.kamada_kawai_layout(graph), nx.circular_layout(range(topology.num_workers))]
    for seed in range(12):
        start = nx.spring_layout(graph, seed=seed)
        candidates += [start, nx.kamada_kawai_layout(graph, pos=start)]
    drawn = [_array(points, topology) for points in candidates]
    return min(drawn, key=lambda points: _confusion(points, topology))


def _array(points: Any, topology: Topology) -> Points:
    return np.array([points[i] for i in range(topology.num_workers)], dtype=np.float64)


def _confusion(points: Points, topology: Topology) -> float:
    """How hard a drawing is to read: links through workers, workers in a heap, links that cross."""
    span = np.ptp(points, axis=0).max() or 1.0
    unit = points / span
    starts, ends = unit[topology.link_array[:, 0]], unit[topology.link_array[:, 1]]
    along = ends - starts
    offset = unit[:, None, :] - starts[None]
    t = (offset * along).sum(-1) / np.maximum((along**2).sum(-1), 1e-12)
    foot = starts[None] + np.clip(t, 0, 1)[..., None] * along
    distance = np.linalg.norm(unit[:, None, :] - foot, axis=-1)
    m = topology.num_workers
    own = (topology.link_array[None] == np.arange(m)[:, None, None]).any(-1)
    through = np.clip(_NEAR - distance, 0, None)[~own].sum() / _NEAR
    apart = np.linalg.norm(unit[:, None] - unit[None], axis=-1) + 9 * np.eye(m)
    heaped = np.clip(2 * _NEAR - apart, 0, None).sum() / _NEAR
    return float(4 * through + 2 * heaped + 0.5 * _crossings(starts, ends))


def _crossings(starts: Points, ends: Points) -> int:
    def side(a: Points, b: Points, c: Points) -> npt.NDArray[np.float64]:
        left: npt.NDArray[np.float64] = (b[..., 0] - a[..., 0]) * (c[..., 1] - a[..., 1]) - (
            b[..., 1] - a[..., 1]
        ) * (c[..., 0] - a[..., 0])
        return left

    a, b, c, d = starts[:, None], ends[:, None], starts[None], ends[None]
    cross = (side(a, b, c) * side(a, b, d) < -1e-12) & (side(c, d, a) * side(c, d, b) < -1e-12)
    return int(cross.sum()) // 2


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
    """How often each link is used, in exchanges per iteration; in messages, of a one-way link.

    Zero for every link where workers average all at once, as `allreduce` and `local` do.
    """
    activity = dict.fromkeys(plan.topology.links, 0.0)
    if plan.mixing == "average":
        return activity  # an exact average over all workers goes over no link of the plan's own
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
    if not any(activity.values()):
        return dict.fromkeys(activity, "#bbbbbb"), [("#bbbbbb", "not used by this plan")]
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


_RUN_DASHES = ("-", "--", "-.", ":", (0, (6, 2)), (0, (6, 2, 1, 2, 1, 2)))
_KIND_COLORS = {"compute": "#a9b3a3", "exchange": "#0072B2", "wait": "#e0b050"}
_NAMES = {
    "train_loss": "training loss",
    "test_accuracy": "test accuracy",
    "test_loss": "test loss",
    "consensus_distance": "consensus distance",
    "gradient_norm": "average squared gradient norm",
    "epoch": "epochs",
    "time": "seconds",
    "iteration": "iterations",
    "megabytes_sent": "megabytes sent by a worker",
}
_FORESEEN = {
    "consensus_distance": ("predicted_consensus", "thin: forecast, mostly within a factor of 3"),
    "gradient_norm": ("gradient_bound", "thin: Theorem 2's bound"),
}
"""What theory says of a metric, drawn beside it."""


def write_figures(
    runs: Sequence[Run],
    folder: str | Path,
    format: str = "pdf",
    *,
    target_loss: float | None = None,
) -> list[Path]:
    """Write every figure that these runs can fill, and say which.

    Args:
        runs: The runs to compare.
        folder: Where to write; made if missing.
        format: png, svg or pdf.
        target_loss: The loss to mark, as for `compare`.
    """
    comparison = compare(runs, target_loss)
    objective = comparison.objective
    figures: dict[str, Any] = {}
    if objective is not None:
        for axis in ("epoch", "time"):
            figures[f"{objective}-{axis}"] = draw_curves(runs, objective, axis, comparison.target)
    sent = [run.records[-1].megabytes_sent if run.records else None for run in runs]
    if None not in sent and any(sent):
        known = [curves(run.records) for run in runs]
        metric = "test_accuracy" if any("test_accuracy" in c for c in known) else objective
        if metric is not None:
            figures[f"{metric}-megabytes"] = draw_curves(runs, metric, "megabytes_sent")
    if any("consensus_distance" in curves(run.records) for run in runs):
        figures["consensus"] = draw_curves(runs, "consensus_distance", "iteration")
    if any(worker_loads(run) for run in runs):
        figures["workers"] = draw_loads(runs)
    for run, label in zip(runs, label_runs(runs), strict=True):
        name = label.replace(" ", "-").replace(",", "")
        if timeline(run) is not None:
            figures[f"timeline-{name}"] = draw_timeline(run, label)
        if isinstance(run.plan, Plan):
            figures[f"topology-{name}"] = draw_topology(run.plan)
    written = []
    for name, figure in figures.items():
        path = Path(folder) / f"{name}.{format}"
        save_figure(figure, path)
        written.append(path)
    return written


def draw_curves(runs: Sequence[Run], metric: str, axis: str, target: float | None = None) -> Any:
    """One line per run: a metric against epochs, time or iterations, on a logarithmic scale."""
    figure, axes = _axes()
    foreseen, explained = _FORESEEN.get(metric, (None, ""))
    is_foreseen = False
    sound: list[float] = []
    is_any_diverged = False
    for number, (run, label) in enumerate(zip(runs, label_runs(runs), strict=True)):
        known = curves(run.records)
        if metric not in known:
            continue
        style = {"color": _color(runs, number), "ls": _RUN_DASHES[number % len(_RUN_DASHES)]}
        if diverged_at(run, "train_loss") is not None:
            label += " (diverged)"
            is_any_diverged = True
        else:
            sound += [y for y in known[metric]["y"] if y is not None and y > 0]
        axes.plot(known[metric][axis], known[metric]["y"], lw=1.6, label=label, **style)
        if foreseen in known:
            told = known[foreseen]
            axes.plot(told[axis], told["y"], lw=0.8, color=style["color"])
            is_foreseen = True
    if is_foreseen:
        axes.plot([], [], lw=0.8, color="#555555", label=explained)
    if target is not None:
        axes.axhline(target, color="#555555", lw=0.8, ls=":")
    if metric != "test_accuracy":
        axes.set_yscale("log", nonpositive="mask")  # and not a fall to the axis' foot
    if is_any_diverged and sound:  # the last values of a diverged run would flatten all others
        axes.set_ylim(min(sound) / 1.15, max(sound) * 1.15)
    if axis == "megabytes_sent":
        axes.set_xscale("log")  # what is compared differs by orders of magnitude
    elif axis != "time":
        axes.xaxis.get_major_locator().set_params(integer=True)
    is_simulated = axis == "time" and all(run.header.clock == "simulated" for run in runs)
    axes.set_xlabel(f"simulated {_NAMES[axis]}" if is_simulated else _NAMES[axis])
    axes.set_ylabel(_NAMES[metric])
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    return figure


def draw_loads(runs: Sequence[Run]) -> Any:
    """Each worker's communication per iteration, one bar per run (Figure 1b)."""
    figure, axes = _axes()
    drawn = [(n, run, worker_loads(run)) for n, run in enumerate(runs)]
    drawn = [(n, run, load) for n, run, load in drawn if load]
    kind = "planned" if all("planned" in load for _, _, load in drawn) else "measured"
    labels = label_runs(runs)
    width = 0.8 / len(drawn)
    for place, (number, _, load) in enumerate(drawn):
        heights = load.get(kind) or []
        at = [w - 0.4 + (place + 0.5) * width for w in range(len(heights))]
        axes.bar(at, heights, width, color=_color(runs, number), label=labels[number])
    plan = drawn[0][1].plan
    unit = plan.timing.unit if kind == "planned" and plan else "seconds"
    axes.set_xlabel("worker")
    axes.set_ylabel(f"{unit} per iteration, {kind}")
    axes.legend(frameon=False)
    return figure


def draw_timeline(run: Run, label: str, rounds: int = 12) -> Any:
    """The first rounds, one row per worker: computing, talking, waiting."""
    lines = timeline(run)
    assert lines is not None, "the caller asks only for runs that have a timeline"
    figure, axes = _axes(height=1.2 + 0.22 * run.header.num_workers)
    last = lines["rounds"][0] + rounds
    for number, kind in enumerate(KINDS):
        mine = [
            i for i, k in enumerate(lines["kind"]) if k == number and lines["iteration"][i] < last
        ]
        axes.barh(
            [lines["worker"][i] for i in mine],
            [lines["length"][i] for i in mine],
            left=[lines["start"][i] for i in mine],
            color=_KIND_COLORS[kind],
            edgecolor="white",
            linewidth=0.3,
            hatch="////" if kind == "wait" else None,
            label=kind if mine else None,
        )
    axes.invert_yaxis()
    axes.set_xlabel(f"{lines['unit']}, {'as planned' if lines['planned'] else 'as recorded'}")
    axes.set_ylabel("worker")
    axes.set_title(f"{label}: first {rounds} rounds", fontsize=10)
    axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.22))
    return figure


def _axes(height: float = 3.4) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, height), layout="constrained")
    return figure, figure.add_subplot()


def _color(runs: Sequence[Run], number: int) -> str:
    """The strategy's own colour, or the next of the palette when it is taken."""
    strategy = runs[number].header.strategy
    earlier = [run.header.strategy for run in runs[:number]]
    if strategy in LOOKS and strategy not in earlier:
        return LOOKS[strategy].color
    return PALETTE[(number + 4) % len(PALETTE)]
