"""Comparisons: choices side by side at an equal target, with a verdict."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from matcha._io import encode_number
from matcha._io.tables import Table, data_frame
from matcha.records import Run
from matcha.report import figures, tables
from matcha.report.groups import (
    Group,
    difference,
    group_runs,
    label_groups,
    link_time_beside_measured,
)
from matcha.report.summary import choose_target, summarise, with_speedups
from matcha.report.verdict import Summary, Verdict, judge
from matcha.topology.drawing import axes_or_new


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Choices side by side at an equal target."""

    objective: str | None
    """Which loss the target is of; None where no run recorded one."""
    target: float | None
    given: bool
    """Whether the target was asked for, rather than the lowest loss that every run reached."""
    rows: tuple[Summary, ...]
    groups: tuple[Group, ...]
    """The runs of each row."""
    verdict: Verdict

    @property
    def winner(self) -> int | None:
        """The row that may be called first; None where none may."""
        return self.verdict.winner

    def table(self) -> Table:
        """The rows in words, in the columns that these runs can fill."""
        rows = [asdict(row) for row in self.rows]
        shown = tables.columns(rows)
        names = [f"{r['label']}{'' if r['diverged_at'] is None else ' (diverged)'}" for r in rows]
        cells = ([tables.cell(column, row) for column in shown] for row in rows)
        headings = ["run", *(column.heading for column in shown)]
        return Table(headings, [[name, *line] for name, line in zip(names, cells, strict=True)])

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
        runs = [run for group in self.groups for run in group.runs]
        target = self.target if metric in (None, self.objective) else None
        ax = axes_or_new(ax)
        figures.plot_curves(ax, runs, metric or self.objective or "worker_loss", axis, target)
        return ax

    def __str__(self) -> str:
        return f"{self.table()}\n{self.verdict.sentence}"

    def __repr__(self) -> str:
        return str(self)

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
                    "path": str(group.runs[0].path),
                    "paths": [str(run.path) for run in group.runs],
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
        for group, label in zip(groups, label_groups(groups), strict=True)
    ]
    reason = difference(runs)
    if reason is None:
        rows = with_speedups(rows)
    return Comparison(
        objective=objective,
        target=target,
        given=given,
        rows=tuple(rows),
        groups=tuple(groups),
        verdict=judge(
            rows,
            objective,
            target,
            unlike=reason,
            link_time=link_time_beside_measured(runs),
        ),
    )
