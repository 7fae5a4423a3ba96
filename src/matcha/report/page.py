"""The page: one self-contained HTML file that opens offline and asks the network for nothing."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib import resources
from pathlib import Path
from typing import Any

from matcha._io import write_atomically
from matcha._io.tables import count_noun
from matcha._numerics import ProgressCallback
from matcha.errors import InputError
from matcha.plans import PlanLike
from matcha.records import Run, find_runs, read_run
from matcha.report import words
from matcha.report.comparison import Comparison, compare
from matcha.report.explorer import network
from matcha.report.groups import Group, clock_in_words, label_runs
from matcha.report.series import mean_curves, presence, short, timeline, worker_loads
from matcha.report.styles import STYLES, place, style_sheet, styles_of
from matcha.report.tables import details, results_table
from matcha.report.verdict import Summary
from matcha.strategies import COMPARED, STRATEGIES, has_budget
from matcha.sweeps import DEFAULT_BUDGETS
from matcha.topology import Topology


def build_payload(
    runs: Sequence[Run],
    plans: Sequence[PlanLike] = (),
    *,
    title: str | None = None,
    target_loss: float | None = None,
    explore: bool = False,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """Everything the page shows.

    Args:
        runs: The runs, in the order to show them.
        plans: Plans to explore that were not run; of a staged one, each level.
        title: The page's heading; by default made from the task and topology.
        target_loss: The loss at which runs are compared, as for `compare`.
        explore: Plan every compared strategy at many budgets, for the slider; by default only the
            plans of the runs are shown.
        progress: Called with (done, total, "budgets") while they are planned.
    """
    comparison = compare(runs, target_loss)
    given = [*(run.plan for run in runs if run.plan is not None), *plans]
    every = [level for plan in given for level in plan.levels]
    topologies = _distinct(plan.topology for plan in every)
    networks = []
    winner = comparison.winner
    opened = None if winner is None else comparison.groups[winner].plan
    first = [] if opened is None else opened.levels
    for number, topology in enumerate(topologies):
        networks.append(
            network(
                topology,
                [plan for plan in every if _alike(plan.topology, topology)],
                start=next((plan for plan in first if _alike(plan.topology, topology)), None),
                strategies=COMPARED if explore else (),
                budgets=DEFAULT_BUDGETS if explore else (),
                progress=_share(progress, number, len(topologies)),
            )
        )
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
            "network": None if group.plan is None else _place(group, topologies),
            "curves": mean_curves(group.runs),
            "hit": _hit(row, comparison),
            "timeline": timeline(group.runs[0]),
            "presence": presence(group.runs[0]),
            "workers": group.runs[0].header.num_workers,
            "loads": worker_loads(group.runs[0]),
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
        "styles": [asdict(style) for style in STYLES],
        "runs": shown,
        "networks": networks,
    }


def _hit(row: Summary, comparison: Comparison) -> dict[str, Any] | None:
    """Where the target was reached, to mark on the curves."""
    if row.time_to_target is None:
        return None
    return {
        "epoch": short(row.epochs_to_target),
        "time": short(row.time_to_target),
        "y": short(comparison.target),
    }


def _distinct(topologies: Any) -> list[Topology]:
    found: list[Topology] = []
    for topology in topologies:
        if not any(_alike(topology, other) for other in found):
            found.append(topology)
    return found


def _alike(a: Topology, b: Topology) -> bool:
    return (a.num_workers, a.links, a.link_times) == (b.num_workers, b.links, b.link_times)


def _place(group: Group, topologies: Sequence[Topology]) -> int:
    return next(i for i, t in enumerate(topologies) if _alike(group.plan.topology, t))


def _share(progress: ProgressCallback | None, number: int, count: int) -> ProgressCallback | None:
    if progress is None:
        return None
    return lambda done, total, what: progress(number * total + done, count * total, what)


def _round_numbers(value: Any) -> Any:
    """Numbers as a page needs them, at any depth."""
    if isinstance(value, dict):
        return {key: _round_numbers(inner) for key, inner in value.items()}
    return short(value) if isinstance(value, float) else value


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
        found,
        plans,
        title=title,
        target_loss=target_loss,
        explore=explore,
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
    has, is_live = _sections(payload), bool(payload.get("live"))
    holes = {
        "live": _asset("live.html") if is_live else "",
        "connect": "; connect-src 'self'" if is_live else "",
        "asks": "It asks the run alone, and no other place" if is_live else "No network requests",
        "title": html.escape(payload["title"]),
        "decided": "" if payload["winner"] is None else " decided",
        "headline": html.escape(payload["verdict"]),
        "facts": _facts(payload, runs),
        "results": results_table(payload) if runs else "",
        "hidden_results": "" if runs and not is_live else "hidden",
        "again": details(runs, label_runs(runs)) if runs else "",
        "hidden_curves": "" if has["curves"] else "hidden",
        "hidden_bytes": "" if has["bytes"] else "hidden",
        "bytes_text": html.escape(
            words.curve_text(payload, payload["objective"] or "train_loss", "megabytes_sent")
        ),
        "hidden_explorer": "" if payload["networks"] else "hidden",
        "hidden_consensus": "" if has["consensus_distance"] else "hidden",
        "hidden_timeline": "" if has["timeline"] and not is_live else "hidden",
        "hidden_presence": "" if has["presence"] else "hidden",
        "hidden_loads": "" if has["loads"] and not is_live else "hidden",
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
        "script": _script("\n".join(map(_asset, (*_SCRIPTS, "live.js") if is_live else _SCRIPTS))),
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
        f"{net['name']}: {len(net['labels'])} workers, {count_noun(net['num_links'], 'link')}"
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
