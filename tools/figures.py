"""Fills the figures of the README and the docs from committed result files.

    python tools/figures.py           # write
    python tools/figures.py --check   # say what differs, exit 1 if anything does

A page marks a region with <!-- begin:NAME --> and <!-- end:NAME -->; what stands between is made
here from benchmarks/results/. Pictures carry a fingerprint of the numbers they were drawn from, so
that a check needs no drawing (and no two versions of matplotlib need to agree on the last bit).
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
_REGION = re.compile(
    r"(?P<begin><!-- begin:(?P<name>[\w.:/-]+) -->\n)(?P<body>.*?)(?P<end><!-- end:(?P=name) -->)",
    flags=re.DOTALL,
)
_FINGERPRINT = re.compile(r"<!-- data: ([0-9a-f]{64}) -->")
Data = Any


def result(name: str) -> Data:
    """A committed result file."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def table(headings: Sequence[str], rows: Iterable[Sequence[object]], align: str = "") -> str:
    """A Markdown table; `align` has l or r for each column, all left by default."""
    marks = {"l": "---", "r": "---:"}
    lines = [headings, [marks[a] for a in align or "l" * len(headings)], *rows]
    return "".join("| " + " | ".join(str(cell) for cell in line) + " |\n" for line in lines)


# -- regions: name -> Markdown ---------------------------------------------------------------------


def tradeoff_table() -> str:
    """Consensus error by strategy and budget on the two graphs of the picture."""
    document = result("tradeoff.json")
    known = {(p["graph"], p["strategy"], p["budget"]): p for p in document["points"]}
    strategies = [s for s in ("periodic", "matcha", "greedy") if ("er8", s, 0.1) in known]
    rows = []
    for graph in document["num_colors"]:
        for budget in (0.02, 0.1, 0.3, 0.5):
            errors = [known[graph, s, budget]["consensus_error"] for s in strategies]
            units = known[graph, "matcha", budget]["comm_units"]
            rows.append([graph, budget, f"{units:.2g}", *(f"{e:.2f}" for e in errors)])
        last = known[graph, "vanilla", 1.0]
        rows.append(
            [graph, "1 (vanilla)", f"{last['comm_units']:g}"]
            + [f"{last['consensus_error']:.2f}"] * len(strategies)
        )
    headings = ["graph", "budget", "units an iteration", *strategies]
    return table(headings, rows, "ll" + "r" * (len(headings) - 2))


def crossings() -> str:
    """What it costs to be as close together as vanilla keeps the workers."""
    rows = [
        [
            f"`paper:{row['graph']}`",
            "1",
            *(f"{row[name]:.2f}" for name in ("matcha_paper", "matcha_best")),
            f"**{row['greedy']:.2f}**",
            f"{row['no_less']:.2f}",
        ]
        for row in result("strategies.json")["crossings"]
    ]
    return table(["graph", "vanilla", "paper", "matcha", "greedy", "no less than"], rows, "lrrrrr")


def slow_links() -> str:
    """Strategies at equal seconds, where a few workers have slow links."""
    rows = [
        [
            f"`{row['graph']}`",
            f"{row['budget']:g}",
            f"{row['seconds']['greedy']:.2f}",
            *(f"{row['error'][name]:.3g}" for name in ("matcha", "blind", "greedy")),
        ]
        for row in result("strategies.json")["slow_links"]
    ]
    headings = ["graph", "budget", "seconds an iteration", "matcha", "blind", "greedy"]
    return table(headings, rows, "llrrrr")


def free_links() -> str:
    """Greedy against sequences with links of their own choosing."""
    names = ("greedy", "one_peer", "finite_time", "no_less")
    rows = [
        [
            row["workers"],
            f"{row['units']:g}",
            *("–" if row.get(name) is None else f"{row[name]:.3g}" for name in names),
        ]
        for row in result("strategies.json")["free_links"]
    ]
    headings = ["workers", "matchings an iteration", "greedy", "one-peer exponential"]
    return table([*headings, "finite-time", "no less than"], rows, "rrrrrr")


def planner() -> str:
    """Seconds, memory and gap of the planner, and of cvxpy's solvers where they were run."""
    document = result("planner.json")
    names = {"erdos-renyi": "Erdős–Rényi", "geometric": "geometric"}
    rows = [
        [
            names[r["family"]],
            f"{r['workers']:,}",
            f"{r['links']:,}",
            r["who"],
            f"{r['eq5_s']:.2f}",
            f"{r['eq9_s']:.2f}",
            f"{r['gap']:.0e}" if "gap" in r else "–",
            f"{r['peak_mb']:.0f}",
        ]
        for r in document["rows"]
    ]
    headings = ["graph", "workers", "links", "by", "eq. 5, s", "eq. 9, s", "gap", "peak MB"]
    ours = {
        r["family"]: r["total_s"]
        for r in document["rows"]
        if r["who"] == "matcha" and r["workers"] == 64
    }
    ratios = [
        f"{r['total_s'] / ours[r['family']]:.0f}× ({names[r['family']]})"
        for r in document["rows"]
        if r["who"] == "CLARABEL"
    ]
    return (
        table(headings, rows, "lrrlrrrr")
        + f"\nFaster than CLARABEL at 64 workers: {', '.join(ratios)}. "
        + f"Machine: {document['machine']}.\n"
    )


def decompositions() -> str:
    """ρ by decomposition on the paper's graphs."""
    document = result("decompositions.json")
    rows = [
        [row["graph"], *(f"{value:.4f}" for value in row["rho"].values())]
        for row in document["rows"]
    ]
    headings = ["graph", "authors' matchings", '`effort="none"`', '`"default"`', '`"high"`']
    return table(headings, rows, "lrrrr")


def printed(name: str) -> str:
    """What a benchmark printed, as it printed it."""
    text = (RESULTS / name).read_text(encoding="utf-8").strip("\n")
    return f"```text\n{text}\n```\n"


REGIONS: dict[str, Callable[[], str]] = {
    "crossings": crossings,
    "decompositions": decompositions,
    "free-links": free_links,
    "planner": planner,
    "slow-links": slow_links,
    "tradeoff-table": tradeoff_table,
}


# -- images: name -> (numbers, drawing) ------------------------------------------------------------


def tradeoff_data() -> Data:
    """Points of the trade-off, by graph and strategy."""
    document = result("tradeoff.json")
    series: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for p in document["points"]:
        line = series.setdefault(p["graph"], {}).setdefault(p["strategy"], [])
        line.append((p["comm_units"], p["consensus_error"]))
    return series


def draw_tradeoff(data: Data) -> Any:
    """Consensus error against communication, both logarithmic, one panel a graph."""
    from matplotlib.figure import Figure

    from matcha.report.figures import STRATEGY_COLORS, STRATEGY_MARKERS

    titles = {
        "er8": "8 workers, the paper's Figure 1",
        "geometric16-d10": "16 workers, dense geometric graph",
    }
    figure = Figure(figsize=(9.2, 3.9), layout="constrained")
    for panel, (graph, lines) in enumerate(data.items(), start=1):
        axes = figure.add_subplot(1, len(data), panel)
        for strategy, points in lines.items():
            x, y = zip(*points, strict=True)
            axes.plot(
                x,
                y,
                color=STRATEGY_COLORS[strategy],
                marker=STRATEGY_MARKERS[strategy],
                ms=9 if strategy == "vanilla" else 4.5,
                mew=2 if strategy == "vanilla" else 1,
                lw=1.8,
                ls="none" if strategy == "vanilla" else "-",
                label=_LABELS[strategy],
                zorder=4 if strategy == "vanilla" else 3,
            )
        (vanilla,) = lines["vanilla"]
        axes.axhline(vanilla[1], color=STRATEGY_COLORS["vanilla"], lw=0.8, ls=":")
        _mark_saving(axes, lines, vanilla)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("communication an iteration (matchings)")
        axes.set_ylabel("disagreement that remains")
        axes.set_title(titles[graph], fontsize=11)
        axes.grid(alpha=0.25, which="major")
        axes.legend(frameon=False, fontsize=9)
    return figure


_LABELS = {
    "vanilla": "vanilla: every link, always",
    "periodic": "periodic: every link, sometimes",
    "matcha": "matcha: the links that matter",
    "greedy": "greedy: the best next matching",
}


def crossing(points: Sequence[tuple[float, float]], error: float) -> float | None:
    """Communication at which a falling curve reaches an error, by log-log interpolation."""
    from math import exp, log

    for (x0, y0), (x1, y1) in pairwise(points):
        if y0 >= error >= y1 and y0 > y1:
            share = (log(y0) - log(error)) / (log(y0) - log(y1))
            return exp(log(x0) + share * (log(x1) - log(x0)))
    return None


def _mark_saving(axes: Any, lines: Mapping[str, Any], vanilla: tuple[float, float]) -> None:
    """An arrow from vanilla to the strategy that reaches its error for least communication."""
    reached = {s: crossing(p, vanilla[1]) for s, p in lines.items() if s != "vanilla"}
    best = min((x for x in reached.values() if x is not None), default=None)
    if best is None or best > 0.9 * vanilla[0]:
        return
    axes.annotate(
        "",
        xy=(best, vanilla[1]),
        xytext=vanilla,
        arrowprops={"arrowstyle": "->", "color": "#444444", "lw": 1.4},
        zorder=5,
    )
    axes.annotate(
        f"{vanilla[0] / best:.1f}× less communication",
        xy=(best, vanilla[1]),
        xytext=(-4, -12),
        textcoords="offset points",
        ha="right",
        fontsize=9,
        color="#444444",
    )


PICTURES: dict[str, tuple[Callable[[], Data], Callable[[Data], Any]]] = {
    "tradeoff": (tradeoff_data, draw_tradeoff),
}


# -- write and check -------------------------------------------------------------------------------


def pages() -> list[Path]:
    """Everything that may hold a region."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(text: str) -> str:
    """A page with its regions made anew.

    Raises:
        KeyError: A region has a name that nothing here makes.
    """
    return _REGION.sub(lambda m: m["begin"] + region(m["name"]) + m["end"], text)


def region(name: str) -> str:
    """What stands between the marks of a name; `printed:FILE` is a benchmark's own output."""
    kind, _, file = name.partition(":")
    body = printed(file) if kind == "printed" else REGIONS[name]()
    return f"\n{body}\n"  # Markdown wants a blank line between a comment and a table


def fingerprint(data: Data) -> str:
    """Of the numbers in a picture."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def svg(figure: Any, data: Data) -> str:
    """A figure as SVG, the same text for the same numbers, its fingerprint inside."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "matcha", "svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    # Keep diffs small: matplotlib leaves spaces at the ends of lines.
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    return text.replace("<svg ", f"<!-- data: {fingerprint(data)} -->\n<svg ", 1)


def differences() -> list[str]:
    """What a fresh run would change, a sentence each."""
    found = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        for match in _REGION.finditer(text):
            if match["body"] != region(match["name"]):
                place = page.relative_to(ROOT)
                found.append(f"{place}: {match['name']!r} differs from benchmarks/results.")
    for name, (numbers, _) in PICTURES.items():
        path = IMAGES / f"{name}.svg"
        stamp = _FINGERPRINT.search(path.read_text(encoding="utf-8")) if path.exists() else None
        if stamp is None or stamp[1] != fingerprint(numbers()):
            found.append(f"docs/images/{name}.svg was not drawn from benchmarks/results.")
    return found


def write() -> None:
    """Make every region and picture anew."""
    for page in pages():
        old = page.read_text(encoding="utf-8")
        new = filled(old)
        if new != old:
            page.write_text(new, encoding="utf-8")
            print(f"wrote {page.relative_to(ROOT)}")
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name, (numbers, draw) in PICTURES.items():
        data = numbers()
        path = IMAGES / f"{name}.svg"
        text = svg(draw(data), data)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")


def main() -> None:
    """Parse, then write or check."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 on a difference"
    )
    if not parser.parse_args().check:
        write()
        return
    found = differences()
    print("\n".join(found) or "every figure agrees with benchmarks/results.")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
