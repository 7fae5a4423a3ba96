"""Comparisons: choices side by side at an equal target, with a verdict and a table."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from matcha._io import encode_number
from matcha._io.tables import Table, data_frame
from matcha.records import Run
from matcha.report import figures, words
from matcha.report.groups import difference, group_runs, label_runs, link_time_beside_measured
from matcha.report.summary import choose_target, summarise, with_speedups
from matcha.report.verdict import Summary, Verdict, judge
from matcha.topology.drawing import axes_or_new


class Column(NamedTuple):
    """A column of the comparison: its heading, its cell, and which value is best."""

    key: str
    heading: str
    show: Callable[[Any], str]
    best: Callable[[Sequence[Any]], Any] | None = None
    only: tuple[str, Any] | None = None
    """The field and its value that a row must have to stand here: a clock, a unit."""
    to_target: bool = False
    """Whether it counts up to the target, so that a row which missed it has nothing to compare."""
    brief: str | None = None
    """Its heading on a terminal, where that is shorter."""
    spare: int | None = 0
    """The higher, the sooner it goes where a terminal is narrow; None: only pages have it."""

    def value(self, row: Mapping[str, Any]) -> Any:
        """A row's value; None where the row has none that compares with the column's others."""
        if self.only is not None and row[self.only[0]] != self.only[1]:
            return None
        return None if self.to_target and row["time_to_target"] is None else row[self.key]


_USUAL = (None, "float32", "local")
"""What says nothing when every row has it."""


def columns(summaries: Sequence[Mapping[str, Any]]) -> list[Column]:
    """The columns that these runs can fill."""
    reached = any(row["time_to_target"] is not None for row in summaries)
    target = " to target" if reached else ""

    def each(field: str, heading: str, **more: Any) -> list[Column]:
        """A column per clock or unit, which seconds and numbers of another must not share."""
        found = dict.fromkeys(row[field] for row in summaries)
        named = field == "unit" or len(found) > 1
        titles = {value: f"{heading}, {value}" if named else heading for value in found}
        return [Column(heading=titles[value], only=(field, value), **more) for value in found]

    # A delay model in seconds says again what the clock says.
    told = all(row["comm_seconds"] is not None for row in summaries)
    in_seconds = told and all(
        row["clock"] == "wall" or row["unit"] == "seconds" for row in summaries
    )
    talk: dict[str, Any] = {"heading": f"communication{target}", "to_target": reached, "best": min}
    timed: dict[str, Any] = {"show": words.seconds}
    fewer: dict[str, Any] = {"show": words.number, "best": min}
    sooner: dict[str, Any] = {"show": "{:.2f}×".format, "best": max}
    every = [
        Column("budget", "budget", words.number, spare=None),
        Column("wire", "wire", str, spare=None),
        Column("momentum", "momentum", str, spare=None),
        *each("clock", key="time_to_target", heading="time to target", **timed, best=min),
        Column("speedup", "sooner than vanilla", **sooner, brief="× vanilla"),
        Column("speedup_over_allreduce", "sooner than allreduce", **sooner, brief="× allreduce"),
        *each("clock", key="comm_seconds", **talk, **timed, spare=2 if in_seconds else None),
        *each("unit", key="comm_units", **talk, show=words.number, spare=None if in_seconds else 2),
        Column("megabytes_sent", "megabytes sent", **fewer, brief="MB sent", spare=3),
        Column("epochs_to_target", "epochs to target", **fewer, spare=None),
        Column("train_loss", "training loss", words.number),
        Column("worker_loss", "workers' own loss", words.number, spare=None),
        Column("test_accuracy", "test accuracy", words.percent, max, spare=1),
        Column("consensus_distance", "consensus distance", **fewer, brief="consensus", spare=5),
        Column("function_distance", "outputs apart", **fewer, spare=4),
        *each("clock", key="time", heading="run time", **timed, spare=6),
    ]
    return [
        c
        for c in every
        if any(c.value(row) not in _USUAL for row in summaries)
        and not (told and c.only == ("unit", "seconds"))
    ]


def cell(column: Column, row: Mapping[str, Any]) -> str:
    """A value for people, with its deviation over the seeds where there are several."""
    value, spread = column.value(row), row["deviations"].get(column.key)
    if value is None:
        return "–"
    if column.key == "time_to_target" and row["at_first_evaluation"]:
        return f"≤ {column.show(value)}"
    return column.show(value) + ("" if spread is None else f" ± {column.show(spread)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Choices side by side at an equal target."""

    objective: str | None
    """Which loss the target is of; None where no run recorded one."""
    target: float | None
    given: bool
    """Whether the target was asked for, rather than the lowest loss that every run reached."""
    rows: tuple[Summary, ...]
    groups: tuple[tuple[Run, ...], ...]
    """The runs of each row."""
    verdict: Verdict

    @property
    def winner(self) -> int | None:
        """The row that may be called first; None where none may."""
        return self.verdict.winner

    def table(self) -> Table:
        """The rows in words, in the columns that these runs can fill."""
        shown = self.cells()
        headings = ["run", *(column.heading for column in shown)]
        return Table(headings, list(zip(self.names, *shown.values(), strict=True)))

    @property
    def names(self) -> list[str]:
        """What each row is called."""
        return [f"{r.label}{'' if r.diverged_at is None else ' (diverged)'}" for r in self.rows]

    def cells(self) -> dict[Column, list[str]]:
        """The columns that these runs can fill, and a cell of each for every row."""
        rows = [asdict(row) for row in self.rows]
        return {column: [cell(column, row) for row in rows] for column in columns(rows)}

    def to_frame(self) -> Any:
        """The rows as a pandas DataFrame.

        Raises:
            PackageError: pandas is not installed.
        """
        return data_frame(map(asdict, self.rows))

    def plot(self, metric: str | None = None, axis: str = "time", ax: Any = None) -> Any:
        """Draw a line per run, on matplotlib's axes or those of a new figure; returns the axes.

        Args:
            metric: What to draw, as `test_accuracy`; by default the loss that is compared.
            axis: Against `time`, `epoch`, `iteration` or `megabytes_sent`.
            ax: Matplotlib's axes.

        Raises:
            PackageError: matplotlib is not installed.
        """
        runs = [run for group in self.groups for run in group]
        target = self.target if metric in (None, self.objective) else None
        ax = axes_or_new(ax)
        figures.plot_curves(ax, runs, metric or self.objective or "worker_loss", axis, target)
        return ax

    def __str__(self) -> str:
        return f"{self.table()}\n{self.verdict.sentence}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"{self.table()._repr_html_()}<p>{html.escape(self.verdict.sentence)}</p>"

    def to_json(self) -> dict[str, Any]:
        """The comparison as plain JSON values, with the directories of each row's runs."""
        rows = zip(self.rows, self.groups, strict=True)
        return {
            "objective": self.objective,
            "target": self.target,
            "given": self.given,
            "verdict": self.verdict.sentence,
            "winner": self.winner,
            "rows": [
                {name: encode_number(value) for name, value in asdict(row).items()}
                | {
                    "unranked": self.verdict.unranked.get(number),
                    "path": str(group[0].path),
                    "paths": [str(run.path) for run in group],
                }
                for number, (row, group) in enumerate(rows)
            ],
        }


def compare(runs: Sequence[Run], target_loss: float | None = None) -> Comparison:
    """Summarise runs at an equal target loss.

    Args:
        runs: The runs; those that differ only in their seed become one row.
        target_loss: The loss to reach. By default what the runs' own configuration calls
            `target_loss`, or else the lowest loss that every run held in two evaluations (but
            those that diverged, and those that never communicated, such as `silent`).
    """
    objective, target, given = choose_target(runs, target_loss)
    groups = group_runs(runs)
    rows = [
        summarise(group, label, objective, target)
        for group, label in zip(groups, label_runs([group[0] for group in groups]), strict=True)
    ]
    reason = difference(runs)
    if reason is None:
        rows = with_speedups(rows)
    link_time = link_time_beside_measured(runs)
    return Comparison(
        objective=objective,
        target=target,
        given=given,
        rows=tuple(rows),
        groups=tuple(groups),
        verdict=judge(rows, objective, target, unlike=reason, link_time=link_time),
    )
