"""The page: one self-contained HTML file that opens offline and asks the network for nothing."""

from __future__ import annotations

import html
import json
import re
import shlex
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from matcha._io import write_atomically
from matcha._io.tables import count_noun
from matcha._numerics import ProgressCallback
from matcha.errors import InputError
from matcha.plans import Plan, PlanLike
from matcha.records import Run, find_runs, read_run
from matcha.report import words
from matcha.report.comparison import Column, cell, columns, compare
from matcha.report.explorer import network
from matcha.report.groups import clock_in_words, label_runs
from matcha.report.series import curves, presence, short, timeline, worker_loads
from matcha.strategies import COMPARED, STRATEGIES, has_budget
from matcha.strategies.registry import look_of
from matcha.sweeps import DEFAULT_BUDGETS


def build_payload(
    runs: Sequence[Run],
    plans: Sequence[PlanLike] = (),
    *,
    title: str | None = None,
    target_loss: float | None = None,
    explore: bool = False,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """Everything the page shows, from the arguments of `write_report`."""
    comparison = compare(runs, target_loss)
    winner = comparison.winner
    opened = None if winner is None else comparison.groups[winner][0].plan
    explored: dict[Hashable, list[Plan]] = {}
    for plan in [*(run.plan for run in runs if run.plan is not None), *plans]:
        explored.setdefault(_where(plan), []).extend(plan.levels)
    networks = [
        network(
            levels[0].topology,
            levels,
            start=opened.levels[0] if opened is not None and _where(opened) == where else None,
            strategies=COMPARED if explore else (),
            budgets=DEFAULT_BUDGETS if explore else (),
            progress=_share(progress, number, len(explored)),
        )
        for number, (where, levels) in enumerate(explored.items())
    ]
    styles = styles_of([row.strategy for row in comparison.rows])
    shown = [
        {
            "label": row.label,
            "style": style,
            "strategy": row.strategy,
            "budget": row.budget,
            "clock": row.clock,
            "unit": row.unit,
            "seeds": row.seeds,
            "diverged": row.diverged_at is not None,
            "network": None if group[0].plan is None else [*explored].index(_where(group[0].plan)),
            "curves": curves(*(run.records for run in group)),
            # Where the target was reached, to mark on the curves.
            "hit": None
            if row.time_to_target is None
            else {
                "epoch": short(row.epochs_to_target),
                "time": short(row.time_to_target),
                "y": short(comparison.target),
            },
            "timeline": timeline(group[0]),
            "presence": presence(group[0]),
            "workers": group[0].header.num_workers,
            "loads": worker_loads(group[0]),
        }
        for group, row, style in zip(comparison.groups, comparison.rows, styles, strict=True)
    ]
    return {
        "title": title or words.title(runs, plans),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "objective": comparison.objective,
        "target": short(comparison.target),
        "target_given": comparison.given,
        "winner": winner,
        "verdict": comparison.verdict.sentence,
        "unranked": sorted(comparison.verdict.unranked),
        "summaries": [_round_numbers(asdict(row)) for row in comparison.rows],
        "strategies": list(STRATEGIES),
        "styles": [style._asdict() for style in STYLES],
        "runs": shown,
        "networks": networks,
    }


def _where(plan: PlanLike) -> Hashable:
    """What tells the networks of plans apart, whatever they are called."""
    topology = plan.topology
    return topology.num_workers, topology.links, topology.link_times


def _share(progress: ProgressCallback | None, number: int, count: int) -> ProgressCallback | None:
    if progress is None:
        return None
    return lambda done, total, what: progress(number * total + done, count * total, what)


def _round_numbers(value: Any) -> Any:
    """Numbers as a page needs them, at any depth."""
    if isinstance(value, dict):
        return {key: _round_numbers(inner) for key, inner in value.items()}
    return short(value) if isinstance(value, float) else value


_SCRIPTS = (
    "base.js", "charts.js", "curves.js", "network.js", "explorer.js", "presence.js", "timeline.js",
)  # fmt: skip


def write_report(
    runs: Sequence[Run | str | Path],
    path: str | Path,
    *,
    plans: Sequence[PlanLike] = (),
    title: str | None = None,
    target_loss: float | None = None,
    explore: bool = False,
    progress: ProgressCallback | None = None,
) -> Path:
    """Write one self-contained HTML page about some runs.

    Args:
        runs: Runs, or directories that hold runs (at any depth).
        path: The page to write.
        plans: Plans that were not run, to explore beside the runs or instead of them.
        title: Its heading.
        target_loss: The loss at which the runs are compared; by default what their configuration
            says, or else the lowest that all of them reached.
        explore: Plan every compared strategy at many budgets, for a slider; by default only the
            plans of the runs are shown.
        progress: Called with (done, total, "budgets") while they are planned.

    Returns:
        The path written.

    Raises:
        InputError: There is no run to show, or a directory does not hold one.
    """
    found = load_runs(runs) if runs or not plans else []
    payload = build_payload(
        found, plans, title=title, target_loss=target_loss, explore=explore, progress=progress
    )
    write_atomically(Path(path), render(payload, found))
    return Path(path)


def load_runs(runs: Sequence[Run | str | Path]) -> list[Run]:
    """Runs as given, and those found in the directories given.

    Raises:
        InputError: A directory holds no run, or there is nothing at all.
    """
    loaded: list[Run] = []
    for entry in runs:
        if isinstance(entry, Run):
            loaded.append(entry)
            continue
        below = [read_run(directory) for directory in find_runs(entry)]
        if not below:
            raise InputError(f"{str(entry)!r} holds no run (no run.json there or below).")
        loaded += sorted(below, key=_reading_order)
    if not loaded:
        raise InputError("a report needs at least one run.")
    return loaded


def _reading_order(run: Run) -> tuple[int, float, int, str]:
    """What is compared with comes first."""
    header = run.header
    return place(header.strategy), header.budget, header.seed, header.name


def render(payload: Mapping[str, Any], runs: Sequence[Run]) -> str:
    """The page as text."""
    is_live = bool(payload.get("live"))
    loss = payload["objective"] or "train_loss"
    known = [(name, curve) for run in payload["runs"] for name, curve in run["curves"].items()]
    losses = [c for name, c in known if name not in ("consensus_distance", "predicted_consensus")]
    sections = {
        "curves": losses,
        "bytes": any(any(curve["megabytes_sent"]) for curve in losses),
        "consensus": any(name == "consensus_distance" for name, _ in known),
        "timeline": any(run["timeline"] for run in payload["runs"]) and not is_live,
        "presence": any(run["presence"] for run in payload["runs"]),
        "loads": any(run["loads"] for run in payload["runs"]) and not is_live,
        "results": runs and not is_live,
        "explorer": payload["networks"],
    }
    texts = {
        "title": payload["title"],
        "headline": payload["verdict"],
        "bytes_text": words.curve_text(payload, loss, "megabytes_sent"),
        "rho_note": words.RHO_NOTE,
        "loads_text": words.loads_text(payload),
        "consensus_text": words.curve_text(payload, "consensus_distance", "iteration"),
        "epoch_text": words.curve_text(payload, loss, "epoch"),
        "time_text": words.curve_text(payload, loss, "time"),
        "created": payload["created"].replace("T", " ").replace("+00:00", " UTC"),
    }
    holes = {
        **{name: html.escape(text) for name, text in texts.items()},
        **{f"hidden_{name}": "" if full else "hidden" for name, full in sections.items()},
        "live": _asset("live.html") if is_live else "",
        "connect": "; connect-src 'self'" if is_live else "",
        "asks": "It asks the run alone, and no other place" if is_live else "No network requests",
        "decided": "" if payload["winner"] is None else " decided",
        "facts": _facts(payload, runs),
        "results": results_table(payload) if runs else "",
        "again": details(runs, label_runs(runs)) if runs else "",
        "style": style_sheet() + _asset("page.css"),
        "plotly": _script(_asset("plotly-basic.min.js")),
        "script": _script("\n".join(map(_asset, (*_SCRIPTS, "live.js") if is_live else _SCRIPTS))),
        "data": embed_json(payload),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda hole: holes[hole[1]], _asset("page.html"))


def embed_json(document: Any) -> str:
    r"""JSON that is safe inside a script element, whatever names the user chose.

    >>> print(embed_json({"label": "</script>"}))
    {"label":"\u003c/script>"}
    """
    text = json.dumps(document, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _facts(payload: Mapping[str, Any], runs: Sequence[Run]) -> str:
    """The line under the heading: workers, links, budgets, clock, and anything emulated."""
    facts = [
        f"{net['name']}: {len(net['labels'])} workers, {count_noun(net['num_links'], 'link')}"
        for net in payload["networks"]
    ]
    headers = [run.header for run in runs]
    budgets = dict.fromkeys(f"{h.budget:g}" for h in headers if has_budget(h.strategy))
    if budgets:
        facts.append(f"budget C_b {', '.join(budgets)}")
    wires = dict.fromkeys(header.wire for header in headers)
    if set(wires) - {"float32"}:
        facts.append(f"messages {', '.join(wires)}")
    momenta = dict.fromkeys(header.momentum or "local" for header in headers)
    if set(momenta) - {"local"}:
        facts.append(f"momentum {', '.join(momenta)}")
    clocks = " and ".join(sorted({header.clock for header in headers}))
    if clocks:
        counted = clock_in_words(runs)
        facts.append(f"{clocks} clock" + ("" if counted is None else f": {counted}"))
    speeds = {speed for header in headers if (speed := words.link_speed(header)) is not None}
    facts += [f"links emulated at {speed}" for speed in sorted(speeds)]
    return "".join(f"<li>{html.escape(fact)}</li>" for fact in facts)


def _asset(name: str) -> str:
    return (resources.files("matcha.report") / "assets" / name).read_text(encoding="utf-8")


def _script(text: str) -> str:
    """Script text that cannot end its element early."""
    return text.replace("</script", "<\\/script")


# -- tables: the results, and what it takes to do the runs again


def results_table(payload: Mapping[str, Any]) -> str:
    """The comparison as an HTML table.

    Where there is a winner, the best of a column among those that are ranked is bold and says so
    to readers.
    """
    rows, unranked = payload["summaries"], payload["unranked"]
    head, body = '<th scope="col">run</th>', []
    for row, run in zip(rows, payload["runs"], strict=True):
        swatch = f'<span class="swatch" data-style="{run["style"]}" aria-hidden="true"></span>'
        note = "" if row["diverged_at"] is None else " <em>(diverged)</em>"
        label = html.escape(row["label"])
        body.append(f'<th scope="row" data-value="{label}">{swatch}{label}{note}</th>')
    for column in columns(rows):
        head += f'<th scope="col">{html.escape(column.heading)}</th>'
        ranked = [column.value(row) for n, row in enumerate(rows) if n not in unranked]
        ranked = [value for value in ranked if value is not None]
        differ = payload["winner"] is not None and len(set(ranked)) > 1
        best = column.best(ranked) if differ and column.best else None
        for number, row in enumerate(rows):
            body[number] += _cell(column, row, None if number in unranked else best)
    lines = "".join(f"<tr>{line}</tr>" for line in body)
    return (
        '<table class="results"><caption class="sr">The runs compared</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
    )


def _cell(column: Column, row: Mapping[str, Any], best: Any) -> str:
    value = column.value(row)
    text, *spread = map(html.escape, cell(column, row).split(" ± "))
    if value is not None and value == best:
        text = f'<strong>{text}<span class="sr"> (best)</span></strong>'
    # Beneath its value, so that many columns have room on a page.
    text += "".join(f'<span class="spread"> ± {part}</span>' for part in spread)
    return f"<td>{text}</td>" if value is None else f'<td data-value="{value}">{text}</td>'


def details(runs: Sequence[Run], labels: Sequence[str]) -> str:
    """What it takes to do the runs again: what they share, then what is each one's own."""
    facts = [_run_facts(run) for run in runs]
    shared = {k: v for k, v in facts[0].items() if all(f.get(k) == v for f in facts)}
    if len(runs) == 1:
        return _fold(labels[0], shared, is_open=True)
    parts = [_fold("Shared by all runs", shared, is_open=True)]
    for label, fact in zip(labels, facts, strict=True):
        parts.append(_fold(label, {k: v for k, v in fact.items() if k not in shared}))
    return "\n".join(parts)


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


def _run_facts(run: Run) -> dict[str, Any]:
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
        elif isinstance(value, float):
            flat[name] = f"{value:g}"
        elif value is not None:
            flat[name] = value if isinstance(value, (str, int)) else json.dumps(value)
    return flat


# -- how runs look: every strategy has a style of its own, others take a spare one

_SYMBOLS = {
    "x": "x", "^": "triangle-up", "o": "circle", "s": "square", "D": "diamond",
    "v": "triangle-down", "<": "triangle-left", ">": "triangle-right", "P": "cross", "*": "star",
    "p": "pentagon", "h": "hexagon", "d": "diamond-tall", "H": "hexagon2",
    "8": "octagon", "X": "x-thin-open", "1": "y-down-open", "+": "cross-thin-open",
}  # fmt: skip
"""Matplotlib's markers, as plotly calls them."""
_DASHES = (3, 1, 0, 4, 2, 5)
_SPARE = (
    ("#b0306a", "#f7a1c4", "bowtie"), ("#1f7a8c", "#6fd0e0", "hourglass"),
    ("#5b7a1f", "#b0d468", "star-square"), ("#8c4a9e", "#dba3ea", "pentagon"),
    ("#3f6f9f", "#9cc4ee", "hexagram"), ("#7f5a00", "#d8b26a", "y-up"),
    ("#4f5b66", "#b4c0cc", "asterisk"),
)  # fmt: skip


class Style(NamedTuple):
    """One way to draw a run, told from others by more than its colour."""

    light: str
    dark: str
    symbol: str
    dash: int
    """Position in the page's list of dashes."""


_OWN = [(look.light, look.dark, _SYMBOLS[look.marker]) for look in map(look_of, STRATEGIES)]
STYLES = tuple(
    Style(*colors, _DASHES[number % len(_DASHES)]) for number, colors in enumerate((*_OWN, *_SPARE))
)


def place(strategy: str) -> int:
    """Where a strategy stands among styles and in lists; after all others where it is unknown."""
    return list(STRATEGIES).index(strategy) if strategy in STRATEGIES else len(STRATEGIES)


def styles_of(strategies: Sequence[str]) -> list[int]:
    """A style for each run, by number: its strategy's own where that is still free."""
    free = list(range(len(STYLES)))
    chosen: list[int] = []
    for strategy in strategies:
        spare = [s for s in free if s >= len(STRATEGIES)] or free or [len(chosen) % len(STYLES)]
        own = strategy in STRATEGIES and place(strategy) in free
        chosen.append(place(strategy) if own else spare[0])
        free = [s for s in free if s != chosen[-1]]
    return chosen


def style_sheet() -> str:
    """The colours as variables `--s0`, `--s1`, … of the page, in its two themes."""
    light = " ".join(f"--s{n}: {style.light};" for n, style in enumerate(STYLES))
    dark = " ".join(f"--s{n}: {style.dark};" for n, style in enumerate(STYLES))
    return f':root {{ {light} }}\n:root[data-theme="dark"] {{ {dark} }}\n'
