"""Tables: the comparison of runs, for the page and the terminal, and what it takes to repeat."""

from __future__ import annotations

import html
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matcha.records import Run
from matcha.report import words


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of the comparison: its heading, its cell, and which value is best."""

    key: str
    heading: str
    show: Callable[[Any], str]
    best: Callable[[Sequence[Any]], Any] | None = None
    only: tuple[str, Any] | None = None
    """The field and its value that a row must have to stand here: a clock, a unit."""
    to_target: bool = False
    """Whether it counts up to the target, so that a row which missed it has nothing to compare."""

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

    def each(field: str, key: str, heading: str, **more: Any) -> list[Column]:
        """A column per clock or unit, which seconds and numbers of another must not share."""
        found = list(dict.fromkeys(row[field] for row in summaries))
        named = field == "unit" or len(found) > 1
        return [
            Column(
                key=key,
                heading=f"{heading}, {value}" if named else heading,
                only=(field, value),
                **more,
            )
            for value in found
        ]

    timed = {"show": words.seconds, "best": min}
    talk = f"communication{target}"
    every = [
        Column(key="budget", heading="budget", show=words.number),
        Column(key="wire", heading="wire", show=str),
        Column(key="momentum", heading="momentum", show=words.text),
        *each("clock", "time_to_target", "time to target", **timed),
        Column(key="speedup", heading="sooner than vanilla", show=_times, best=max),
        Column(
            key="speedup_over_allreduce", heading="sooner than allreduce", show=_times, best=max
        ),
        *each("clock", "comm_seconds", talk, to_target=reached, **timed),
        *each("unit", "comm_units", talk, show=words.number, best=min, to_target=reached),
        Column(key="megabytes_sent", heading="megabytes sent", show=words.number, best=min),
        Column(key="epochs_to_target", heading="epochs to target", show=words.number, best=min),
        Column(key="train_loss", heading="training loss", show=words.number),
        Column(key="worker_loss", heading="workers' own loss", show=words.number),
        Column(key="test_accuracy", heading="test accuracy", show=words.percent, best=max),
        Column(key="consensus_distance", heading="consensus distance", show=words.number, best=min),
        Column(key="function_distance", heading="outputs apart", show=words.number, best=min),
        *each("clock", "time", "run time", show=words.seconds),
    ]
    # A delay model in seconds says again what the clock says.
    told = all(row["comm_seconds"] is not None for row in summaries)
    return [
        c
        for c in every
        if any(c.value(row) not in _USUAL for row in summaries)
        and not (told and c.only == ("unit", "seconds"))
    ]


def cell(column: Column, row: Mapping[str, Any]) -> str:
    """A value for people, with its deviation over the seeds where there are several."""
    value = column.value(row)
    text, spread = column.show(value), row["deviations"].get(column.key)
    if column.key == "time_to_target" and row["at_first_evaluation"] and value is not None:
        return f"≤ {text}"
    return text if spread is None or value is None else f"{text} ± {column.show(spread)}"


def results_table(payload: Mapping[str, Any]) -> str:
    """The comparison as an HTML table.

    Where there is a winner, the best of a column among those that are ranked is bold and says so
    to readers.
    """
    rows = payload["summaries"]
    shown = columns(rows)
    head = "".join(f'<th scope="col">{html.escape(c.heading)}</th>' for c in shown)
    ranked = (
        []
        if payload["winner"] is None
        else [row for number, row in enumerate(rows) if number not in payload["unranked"]]
    )
    best = {c.heading: _best(c, ranked) for c in shown}
    body = []
    for number, (row, run) in enumerate(zip(rows, payload["runs"], strict=True)):
        swatch = f'<span class="swatch" data-style="{run["style"]}" aria-hidden="true"></span>'
        note = "" if row["diverged_at"] is None else " <em>(diverged)</em>"
        name = (
            f'<th scope="row" data-value="{html.escape(row["label"])}">'
            f"{swatch}{html.escape(row['label'])}{note}</th>"
        )
        marks = {} if number in payload["unranked"] else best
        cells = "".join(_cell(c, row, marks.get(c.heading)) for c in shown)
        body.append(f"<tr>{name}{cells}</tr>")
    return (
        '<table class="results"><caption class="sr">The runs compared</caption>'
        f'<thead><tr><th scope="col">run</th>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table>"
    )


def details(runs: Sequence[Run], labels: Sequence[str]) -> str:
    """What it takes to do the runs again: what they share, then what is each one's own."""
    facts = [_facts(run) for run in runs]
    shared = {
        key: value for key, value in facts[0].items() if all(f.get(key) == value for f in facts)
    }
    if len(runs) == 1:
        return _fold(labels[0], shared, is_open=True)
    own = [{k: v for k, v in f.items() if k not in shared} for f in facts]
    parts = [_fold(label, f) for label, f in zip(labels, own, strict=True)]
    return "\n".join([_fold("Shared by all runs", shared, is_open=True), *parts])


def _fold(title: str, facts: Mapping[str, Any], *, is_open: bool = False) -> str:
    command = facts.get("command")
    code = f"<pre><code>{html.escape(command)}</code></pre>" if command else ""
    rows = "".join(
        f'<tr><th scope="row">{html.escape(str(key))}</th><td>{html.escape(str(value))}</td></tr>'
        for key, value in facts.items()
        if key != "command"
    )
    return (
        f"<details{' open' if is_open else ''}><summary>{html.escape(title)}</summary>{code}"
        f'<div class="scroll" tabindex="0" role="group" aria-label="Configuration: '
        f'{html.escape(title)}"><table class="facts">{rows}</table></div></details>'
    )


def _facts(run: Run) -> dict[str, Any]:
    header = run.header
    command = header.command or header.config.get("command")
    facts = {
        "command": shlex.join(map(str, command)) if isinstance(command, list) else command,
        "name": header.name,
        "task": header.task,
        "strategy": f"{header.strategy}, budget {header.budget:g}",
        "seed": header.seed,
        "workers": header.num_workers,
        "wire": header.wire,
        "momentum": header.momentum,
        "clock": header.clock,
        "started": header.started,
        "plan digest": None if run.plan is None else run.plan.digest,
        "versions": ", ".join(f"{name} {v}" for name, v in header.versions.items()),
        **_flat({key: value for key, value in header.config.items() if key != "command"}),
    }
    return {key: value for key, value in facts.items() if value is not None}


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings within settings as `outer inner`; what was left open stays out."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}".replace("_", " ")
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{name} ")
        elif value is not None:
            flat[name] = _plain(value)
    return flat


def _plain(value: Any) -> str | int:
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, (str, int)) else json.dumps(value)


def _cell(column: Column, row: Mapping[str, Any], best: Any) -> str:
    value = column.value(row)
    text, *spread = map(html.escape, cell(column, row).split(" ± "))
    if value is not None and value == best:
        text = f'<strong>{text}<span class="sr"> (best)</span></strong>'
    # Beneath its value, so that many columns have room on a page.
    text += "".join(f'<span class="spread"> ± {part}</span>' for part in spread)
    return f"<td>{text}</td>" if value is None else f'<td data-value="{value}">{text}</td>'


def _best(column: Column, rows: Sequence[Mapping[str, Any]]) -> Any:
    values = [value for row in rows if (value := column.value(row)) is not None]
    if column.best is None or len(values) < 2 or len(set(values)) == 1:
        return None
    return column.best(values)


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"
