"""How the reproduced figures look."""

from __future__ import annotations

from typing import Any

from matcha.strategies import COMPARED
from matcha.strategies.registry import look_of
from reproduction.comparisons import Results
from reproduction.trials import Result

COLORS = {name: look_of(name).color for name in COMPARED}
DASHES = {1.0: "-", 0.6: "-", 0.5: "-", 0.4: "-", 0.3: "-", 0.1: "--", 0.02: ":"}


def axes(columns: int, rows: int = 1, width: float = 4.2, height: float = 3.2) -> tuple[Any, Any]:
    """A figure and its axes as a two-dimensional array, without a display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _place(result: Result) -> tuple[int, float, float]:
    """Order of the legend: by strategy, longer runs after the others, large budgets first."""
    trial = result.trial
    strategies = [*COLORS, trial.strategy]
    return strategies.index(trial.strategy), trial.stretch, -trial.budget


def draw_loss(ax: Any, results: Results, topology: str, *, time: bool) -> None:
    """Training loss against epochs or simulated seconds, one line per run (first seed).

    Runs with more epochs than vanilla are drawn faintly, and only against time. Runs that diverged
    leave the picture at its top.
    """
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    finite: list[float] = []
    any_diverged = False
    drawn = [results.seeds(topology, label)[0] for label in results.labels(topology)]
    for result in sorted(drawn, key=_place):
        longer = result.trial.stretch != 1
        if longer and not time:
            continue
        clock = results.seconds(result) if time else [r.epoch for r in result.records]
        points = [
            (x, loss)
            for x, record in zip(clock, result.records, strict=True)
            if (loss := getattr(record, results.loss)) is not None
        ]
        trial = result.trial
        ax.plot(
            [x for x, _ in points],
            [loss for _, loss in points],
            color=COLORS.get(trial.strategy),
            ls=DASHES.get(trial.budget, "-."),
            lw=1.4,
            alpha=0.4 if longer else 1.0,
            label=f"{trial.label} (diverged)" if result.diverged else trial.label,
        )
        any_diverged |= result.diverged
        if not result.diverged:
            finite += [loss for _, loss in points]
    ax.set_xlabel("simulated seconds" if time else "epoch")
    ax.set_ylabel(results.loss_name)
    if time:
        ax.set_xscale("log")
    else:
        ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_yscale("log")
    if any_diverged and finite:
        ax.set_ylim(0.85 * min(finite), 1.15 * max(finite))
    for axis in (ax.xaxis, ax.yaxis) if time else (ax.yaxis,):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FormatStrFormatter("%g"))
        axis.set_minor_formatter(NullFormatter())
    ax.grid(alpha=0.25)
