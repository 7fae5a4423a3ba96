"""Figures for papers and `--plot`, drawn with matplotlib: topologies, sweeps, tuning, runs.

Figures are objects, never pyplot state: drawing one leaves nothing behind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matcha._io import replace_file
from matcha.errors import InputError, require, unknown_name
from matcha.plans import Plan
from matcha.records import Run
from matcha.report import words
from matcha.report.groups import label_runs
from matcha.report.series import AXES, KINDS, METRICS, curves, timeline, worker_loads
from matcha.report.summary import choose_target, diverged_at
from matcha.strategies.registry import LOOKS, look_of
from matcha.sweeps import Sweep
from matcha.topology.drawing import PALETTE
from matcha.tuning import Tuning

FORMATS = (".png", ".svg", ".pdf")


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


def draw_plan(plan: Plan) -> Any:
    """What `Plan.plot` draws, as a figure for a file."""
    figure, axes = _axes(6.4, 5.2)
    plan.plot(axes)
    return figure


def draw_sweep(sweep: Sweep) -> Any:
    """ρ, and the steady-state consensus error where it is known, against the budget."""
    from matplotlib.figure import Figure

    metrics = ["rho"]
    if any(point.consensus_error is not None for point in sweep):
        metrics.insert(0, "consensus_error")
    figure = Figure(figsize=(5.2 * len(metrics), 4.0), layout="constrained")
    for number, metric in enumerate(metrics, start=1):
        sweep.plot(metric, ax=figure.add_subplot(1, len(metrics), number))
    figure.suptitle(sweep.topology.name, fontsize=11)
    return figure


def draw_tuning(tuning: Tuning) -> Any:
    """Time per iteration against consensus error: seconds to the target, the best marked."""
    figure, axis = _axes(6.4, 4.4)
    best = tuning.best
    for strategy, wire in dict.fromkeys((p.strategy, p.wire) for p in tuning.points):
        mine = [p for p in tuning.points if (p.strategy, p.wire) == (strategy, wire)]
        mine = [p for p in mine if 0 < p.consensus_error < math.inf]
        x, y = [p.iteration_seconds for p in mine], [p.consensus_error for p in mine]
        color, marker, *_ = look_of(strategy)
        if wire != best.wire:
            axis.plot(x, y, marker, ls="-", color=color, markersize=4, alpha=0.35)
            continue
        axis.plot(x, y, marker, ls="-", color=color, markersize=4, alpha=1.0, label=strategy)
        for p, at in zip(mine, zip(x, y, strict=True), strict=True):
            seconds = f"{p.seconds:.3g} s" if math.isfinite(p.seconds) else "never"
            axis.annotate(seconds, at, textcoords="offset points", xytext=(5, 4), fontsize=7)
    marked = [best.iteration_seconds], [best.consensus_error]
    axis.plot(*marked, "*", markersize=16, color="black", label=f"best: {best.label}")
    axis.set_yscale("log")
    axis.set_xlabel("time per iteration (s)")
    axis.set_ylabel("steady-state consensus error")
    axis.set_title(f"{tuning.topology.name}: time to the target; other wires pale")
    axis.legend()
    return figure


def save_figure(figure: Any, path: str | Path) -> None:
    """Write a figure; the ending of the file says the format."""
    target = check_format(path)
    with replace_file(target) as partial:
        figure.savefig(partial, format=target.suffix[1:].lower(), dpi=160)


_RUN_DASHES = ("-", "--", "-.", ":", (0, (6, 2)), (0, (6, 2, 1, 2, 1, 2)))
_KIND_LOOKS = {
    "compute": {"color": "#a9b3a3", "edgecolor": "white"},
    "exchange": {"color": "#0072B2", "edgecolor": "white"},
    "wait": {"color": "#e0b050", "edgecolor": "white", "hatch": "////"},
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
    objective, target, _ = choose_target(runs, target_loss)
    known = [curves(run.records) for run in runs]
    figures: dict[str, Any] = {}
    if objective is not None:
        for axis in ("epoch", "time"):
            figures[f"{objective}-{axis}"] = draw_curves(runs, objective, axis, target)
    sent = [run.records[-1].megabytes_sent if run.records else None for run in runs]
    metric = "test_accuracy" if any("test_accuracy" in c for c in known) else objective
    if None not in sent and any(sent) and metric is not None:
        figures[f"{metric}-megabytes"] = draw_curves(runs, metric, "megabytes_sent")
    if any("consensus_distance" in c for c in known):
        figures["consensus"] = draw_curves(runs, "consensus_distance", "iteration")
    if any(worker_loads(run) for run in runs):
        figures["workers"] = draw_loads(runs)
    for run, label in zip(runs, label_runs(runs), strict=True):
        name = label.replace(" ", "-").replace(",", "")
        if timeline(run) is not None:
            figures[f"timeline-{name}"] = draw_timeline(run, label)
        if isinstance(run.plan, Plan):
            figures[f"topology-{name}"] = draw_plan(run.plan)
    written = {Path(folder) / f"{name}.{format}": figure for name, figure in figures.items()}
    for path, figure in written.items():
        save_figure(figure, path)
    return list(written)


def draw_curves(runs: Sequence[Run], metric: str, axis: str, target: float | None = None) -> Any:
    """What `Comparison.plot` draws, as a figure for a file."""
    figure, axes = _axes()
    plot_curves(axes, runs, metric, axis, target)
    return figure


def plot_curves(
    axes: Any, runs: Sequence[Run], metric: str, axis: str, target: float | None = None
) -> None:
    """One line per run: a metric against epochs, time or iterations, on a logarithmic scale."""
    if metric not in METRICS:
        raise unknown_name("metric", metric, METRICS)
    if axis not in AXES:
        raise unknown_name("axis", axis, AXES)
    foreseen, explained = _FORESEEN.get(metric, (None, ""))
    sound: list[float] = []
    is_foreseen = has_diverged = False
    for number, (run, label) in enumerate(zip(runs, label_runs(runs), strict=True)):
        known = curves(run.records)
        if metric not in known:
            continue
        color = _color(runs, number)
        dashes = _RUN_DASHES[number % len(_RUN_DASHES)]
        if diverged_at(run, "train_loss") is not None:
            label += " (diverged)"
            has_diverged = True
        else:
            sound += [y for y in known[metric]["y"] if y is not None and y > 0]
        line = known[metric]
        axes.plot(line[axis], line["y"], lw=1.6, label=label, color=color, ls=dashes)
        if foreseen in known:
            axes.plot(known[foreseen][axis], known[foreseen]["y"], lw=0.8, color=color)
            is_foreseen = True
    if is_foreseen:
        axes.plot([], [], lw=0.8, color="#555555", label=explained)
    if target is not None:
        axes.axhline(target, color="#555555", lw=0.8, ls=":")
    if metric != "test_accuracy" and (sound or has_diverged):
        axes.set_yscale("log", nonpositive="mask")  # and not a fall to the axis' foot
    if has_diverged and sound:  # the last values of a diverged run would flatten all others
        axes.set_ylim(min(sound) / 1.15, max(sound) * 1.15)
    if axis == "megabytes_sent":
        axes.set_xscale("log")  # what is compared differs by orders of magnitude
    elif axis != "time":
        axes.xaxis.get_major_locator().set_params(integer=True)
    is_simulated = axis == "time" and all(run.header.clock == "simulated" for run in runs)
    axes.set_xlabel(f"simulated {words.NAMES[axis]}" if is_simulated else words.NAMES[axis])
    axes.set_ylabel(words.NAMES.get(metric, metric.replace("_", " ")))
    axes.grid(alpha=0.25)
    if axes.get_legend_handles_labels()[0]:  # where all diverged at once there is nothing to name
        axes.legend(frameon=False)


def draw_loads(runs: Sequence[Run]) -> Any:
    """Each worker's communication per iteration, one bar per run (Figure 1b)."""
    figure, axes = _axes()
    drawn = {number: load for number, run in enumerate(runs) if (load := worker_loads(run))}
    kind = "planned" if all("planned" in load for load in drawn.values()) else "measured"
    labels = label_runs(runs)
    width = 0.8 / len(drawn)
    for place, (number, load) in enumerate(drawn.items()):
        heights = load.get(kind) or []
        at = [w - 0.4 + (place + 0.5) * width for w in range(len(heights))]
        axes.bar(at, heights, width, color=_color(runs, number), label=labels[number])
    plan = runs[next(iter(drawn))].plan
    unit = plan.timing.unit if kind == "planned" and plan else "seconds"
    axes.set_xlabel("worker")
    axes.set_ylabel(f"{unit} per iteration, {kind}")
    axes.legend(frameon=False)
    return figure


def draw_timeline(run: Run, label: str, rounds: int = 12) -> Any:
    """The first rounds, one row per worker: computing, talking, waiting."""
    lines = timeline(run)
    assert lines is not None, "the caller asks only for runs that have a timeline"
    figure, axes = _axes(5.2, 1.2 + 0.22 * run.header.num_workers)
    last = lines["rounds"][0] + rounds
    shown = [i for i, iteration in enumerate(lines["iteration"]) if iteration < last]
    for number, kind in enumerate(KINDS):
        mine = [i for i in shown if lines["kind"][i] == number]
        at = {name: [lines[name][i] for i in mine] for name in ("worker", "length", "start")}
        look = _KIND_LOOKS[kind] | {"label": kind if mine else None}
        axes.barh(at["worker"], at["length"], left=at["start"], linewidth=0.3, **look)
    axes.invert_yaxis()
    axes.set_xlabel(f"{lines['unit']}, {'as planned' if lines['planned'] else 'as recorded'}")
    axes.set_ylabel("worker")
    axes.set_title(f"{label}: first {rounds} rounds", fontsize=10)
    axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.22))
    return figure


def _axes(width: float = 5.2, height: float = 3.4) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _color(runs: Sequence[Run], number: int) -> str:
    """The strategy's own colour, or the next of the palette when it is taken."""
    strategy = runs[number].header.strategy
    earlier = [run.header.strategy for run in runs[:number]]
    if strategy in LOOKS and strategy not in earlier:
        return LOOKS[strategy].color
    return PALETTE[(number + 4) % len(PALETTE)]
