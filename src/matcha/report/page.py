"""The page: one self-contained HTML file that opens offline and asks the network for nothing."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from matcha._io import write_atomically
from matcha.errors import InputError
from matcha.plans import PlanLike
from matcha.records import Run, find_runs, read_run
from matcha.report import words
from matcha.report.conditions import clock_in_words
from matcha.report.groups import label_runs
from matcha.report.payload import Progress, build_payload
from matcha.report.styles import place, style_sheet
from matcha.report.tables import details, results_table
from matcha.strategies import has_budget

MAX_BYTES = 5_000_000
_SCRIPTS = (
    "base.js",
    "charts.js",
    "curves.js",
    "network.js",
    "explorer.js",
    "presence.js",
    "timeline.js",
)
_HOLE = re.compile(r"\{\{(\w+)\}\}")


def write_report(
    runs: Sequence[Run | str | Path],
    path: str | Path,
    *,
    plans: Sequence[PlanLike] = (),
    title: str | None = None,
    target: float | None = None,
    sweep_seconds: float = 20.0,
    progress: Progress | None = None,
) -> Path:
    """Write one self-contained HTML page about some runs.

    Args:
        runs: Runs, or directories that hold runs (at any depth).
        path: The page to write.
        plans: Plans that were not run, to explore beside the runs or instead of them.
        title: Its heading.
        target: The loss at which the runs are compared; by default what their configuration calls
            `target_loss`, or else the lowest that all of them reached.
        sweep_seconds: The longest to spend on planning the budget slider's stops.
        progress: Called with (steps done, steps in all).

    Returns:
        The path written.

    Raises:
        InputError: There is no run to show, or a directory does not hold one.
    """
    found = load_runs(runs) if runs or not plans else []
    payload = build_payload(
        found,
        plans,
        title=title,
        target=target,
        sweep_seconds=sweep_seconds,
        progress=progress,
    )
    page = render(payload, found)
    target_file = Path(path)
    write_atomically(target_file, page)
    return target_file


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
        below = find_runs(entry)
        if not below:
            raise InputError(f"{str(entry)!r} holds no run (no run.json there or below).")
        loaded += sorted((read_run(directory) for directory in below), key=_baseline_first)
    if not loaded:
        raise InputError("a report needs at least one run.")
    return loaded


def _baseline_first(run: Run) -> tuple[int, float, int, str]:
    """Runs of a folder in the order to read them: what is compared with comes first."""
    header = run.header
    return place(header.strategy), header.budget, header.seed, header.name


def render(payload: Mapping[str, Any], runs: Sequence[Run]) -> str:
    """The page as text."""
    has = _sections(payload)
    holes = {
        "title": html.escape(payload["title"]),
        "headline": html.escape(payload["verdict"]),
        "facts": _facts(payload, runs),
        "results": results_table(payload) if runs else "",
        "hidden_results": "" if runs else "hidden",
        "again": details(runs, label_runs(runs)) if runs else "",
        "hidden_curves": "" if has["curves"] else "hidden",
        "hidden_bytes": "" if has["bytes"] else "hidden",
        "bytes_text": html.escape(
            words.curve_text(payload, payload["objective"] or "train_loss", "megabytes_sent")
        ),
        "hidden_explorer": "" if payload["networks"] else "hidden",
        "hidden_consensus": "" if has["consensus_distance"] else "hidden",
        "hidden_timeline": "" if has["timeline"] else "hidden",
        "hidden_presence": "" if has["presence"] else "hidden",
        "hidden_loads": "" if has["loads"] else "hidden",
        "rho_note": html.escape(words.RHO_NOTE),
        "loads_text": html.escape(words.loads_text(payload)),
        "consensus_text": html.escape(words.curve_text(payload, "consensus_distance", "iteration")),
        "epoch_text": html.escape(
            words.curve_text(payload, payload["objective"] or "train_loss", "epoch")
        ),
        "time_text": html.escape(
            words.curve_text(payload, payload["objective"] or "train_loss", "time")
        ),
        "created": html.escape(payload["created"].replace("T", " ").replace("+00:00", " UTC")),
        "style": style_sheet() + _asset("page.css"),
        "plotly": _script(_asset("plotly-basic.min.js")),
        "script": _script("\n".join(_asset(name) for name in _SCRIPTS)),
        "data": embed_json(payload),
    }
    return _HOLE.sub(lambda hole: holes[hole[1]], _asset("page.html"))


def embed_json(document: Any) -> str:
    r"""JSON that is safe inside a script element, whatever names the user chose.

    >>> print(embed_json({"label": "</script>"}))
    {"label":"\u003c/script>"}
    """
    text = json.dumps(document, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _sections(payload: Mapping[str, Any]) -> dict[str, bool]:
    runs = payload["runs"]
    metrics = {metric for run in runs for metric in run["curves"]}
    return {
        "curves": bool(metrics - {"consensus_distance", "predicted_consensus"}),
        "bytes": any(
            any(curve["megabytes_sent"])
            for run in runs
            for name, curve in run["curves"].items()
            if name not in ("consensus_distance", "predicted_consensus")
        ),
        "consensus_distance": "consensus_distance" in metrics,
        "timeline": any(run["timeline"] for run in runs),
        "presence": any(run["presence"] for run in runs),
        "loads": any(run["loads"] for run in runs),
    }


def _facts(payload: Mapping[str, Any], runs: Sequence[Run]) -> str:
    """The line under the heading: workers, links, budgets, clock, and anything emulated."""
    facts = [
        f"{net['name']}: {len(net['labels'])} workers, {net['num_links']} links"
        for net in payload["networks"]
    ]
    budgets = dict.fromkeys(
        f"{run.header.budget:g}" for run in runs if has_budget(run.header.strategy)
    )
    if budgets:
        facts.append(f"budget C_b {', '.join(budgets)}")
    wires = dict.fromkeys(run.header.wire for run in runs)
    if set(wires) - {"float32"}:
        facts.append(f"messages {', '.join(wires)}")
    momenta = dict.fromkeys(run.header.momentum or "local" for run in runs)
    if set(momenta) - {"local"}:
        facts.append(f"momentum {', '.join(momenta)}")
    clocks = {run.header.clock for run in runs}
    if clocks:
        counted = clock_in_words(runs)
        told = "" if counted is None else f": {counted}"
        facts.append(f"{' and '.join(sorted(clocks))} clock{told}")
    speeds = {
        str(mbps).removesuffix(" (emulated)")
        for run in runs
        if (mbps := run.header.setting("link_mbps")) is not None
    }
    facts += [f"links emulated at {speed} Mbit/s" for speed in sorted(speeds)]
    return "".join(f"<li>{html.escape(fact)}</li>" for fact in facts)


def _asset(name: str) -> str:
    return (resources.files("matcha.report") / "assets" / name).read_text(encoding="utf-8")


def _script(text: str) -> str:
    """Script text that cannot end its element early."""
    return text.replace("</script", "<\\/script")
