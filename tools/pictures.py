"""The pictures of README and docs, drawn from committed result files.

python tools/pictures.py runs/demo-20261119-1300/report.html  # README's: the top of a demo's page
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from house import draw_house, house_data
from markdown_tables import Data, result


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

    from matcha.strategies.registry import look_of

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
                color=look_of(strategy).color,
                marker=look_of(strategy).marker,
                ms=9 if strategy == "vanilla" else 4.5,
                mew=2 if strategy == "vanilla" else 1,
                lw=1.8,
                ls="none" if strategy == "vanilla" else "-",
                label=_LABELS[strategy],
                zorder=4 if strategy == "vanilla" else 3,
            )
        (vanilla,) = lines["vanilla"]
        axes.axhline(vanilla[1], color=look_of("vanilla").color, lw=0.8, ls=":")
        _mark_saving(axes, lines, vanilla)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("communication per iteration (matchings)")
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


PEER_COLOR, OWN_COLOR = "#B5A27A", "#1b9e77"


def headline_data() -> Data:
    """Seconds to the target of each method, a list for each size of messages."""
    document = result("headline.json")
    sizes = [
        (
            size["size"],
            [(r["method"], r["is_peer"], round(r["seconds"], 3)) for r in size["rows"]
             if r["seconds"] is not None],
        )
        for size in document["sizes"]
    ]  # fmt: skip
    return {"sizes": sizes, "hosts": document["hosts"], "mbps": document["mbps"]}


def draw_headline(data: Data) -> Any:
    """A panel for each size, a bar a method, shortest time at the bottom."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(12.5, 5.4), layout="constrained")
    for axes, (size, runs) in zip(
        figure.subplots(1, len(data["sizes"]), squeeze=False)[0], data["sizes"], strict=True
    ):
        ordered = sorted(runs, key=lambda run: -run[2])
        places = range(len(ordered))
        colors = [PEER_COLOR if is_peer else OWN_COLOR for _, is_peer, _ in ordered]
        bars = axes.barh(places, [run[2] for run in ordered], color=colors)
        axes.bar_label(bars, labels=[f"{run[2]:.1f}" for run in ordered], padding=3, fontsize=8)
        axes.set_yticks(places, [run[0] for run in ordered], fontsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.1)
        axes.set_title(f"messages of {size}", fontsize=10)
        axes.set_xlabel(f"seconds to the same loss, {data['mbps']:g} Mbit/s cards")
        axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        handles=[Patch(color=OWN_COLOR, label="ours"), Patch(color=PEER_COLOR, label="peers")],
        loc="center right",
        frameon=False,
    )
    return figure


_PAPER_GRAPHS = ("er8", "geometric16-d5", "geometric16-d10", "geometric16-d13", "er16")


def greedy_data() -> Data:
    """Error against budget on the paper's graphs."""
    rows = result("strategies.json")["errors"]
    return [row for row in rows if row["graph"] in _PAPER_GRAPHS]


def draw_greedy(data: Data) -> Any:
    """One panel a graph: matcha, matcha with pairwise mixing, greedy, vanilla, and the bound."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.5, 3.1), layout="constrained")
    styles = {
        "matcha": ("o-", "#d95f02"),
        "matcha, pairwise": ("s-", "#7570b3"),
        "greedy": ("D-", "#1b9e77"),
    }
    panels = figure.subplots(1, len(_PAPER_GRAPHS), sharey=True)
    for axes, name in zip(panels, _PAPER_GRAPHS, strict=True):
        mine = [row for row in data if row["graph"] == name]
        budgets = [row["budget"] for row in mine]
        for label, (style, color) in styles.items():
            errors = [row["formula"][label] for row in mine]
            axes.loglog(budgets, errors, style, color=color, markersize=4, label=label)
        bound = [(row["budget"], row["doubling_bound"]) for row in mine if row["doubling_bound"]]
        axes.loglog(*zip(*bound, strict=True), ":", color="#888888", label="no schedule below")
        axes.axhline(mine[0]["vanilla"], color="#444444", linewidth=0.8, linestyle="--")
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("budget")
        axes.set_xticks(budgets, [f"{budget:g}" for budget in budgets], fontsize=8)
        axes.minorticks_off()
    panels[0].set_ylabel("consensus error")
    panels[0].text(0.02, data[0]["vanilla"] * 1.15, "vanilla", fontsize=8, color="#444444")
    panels[0].legend(fontsize=7)
    return figure


_SHARED = [("iid", None), ("dirichlet", 1.0), ("dirichlet", 0.1), ("shards", None)]


def classes_data() -> Data:
    """How many examples of each class each of eight workers has, by partition."""
    from matcha.zoo.data import digits, partition

    labels = digits().train_labels
    return {
        kind if concentration is None else f"{kind}, concentration {concentration:g}": [
            [int((labels[part] == c).sum()) for c in range(10)]
            for part in partition(labels, 8, kind, seed=0, concentration=concentration or 0.5)  # type: ignore[arg-type]
        ]
        for kind, concentration in _SHARED
    }


def draw_classes(data: Data) -> Any:
    """A panel per partition, a dot for each worker and class, as large as their examples."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.2), layout="constrained")
    for axes, (title, counts) in zip(figure.subplots(1, len(data)), data.items(), strict=True):
        for worker, row in enumerate(counts):
            axes.scatter([worker] * len(row), range(len(row)), s=row, color=OWN_COLOR, alpha=0.8)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("worker")
        axes.set_xticks(range(len(counts)))
        axes.set_yticks(range(10))
        axes.margins(0.12)
        axes.grid(alpha=0.2)
    figure.axes[0].set_ylabel("class")
    return figure


PICTURES: dict[str, tuple[Callable[[], Data], Callable[[Data], Any]]] = {
    "classes": (classes_data, draw_classes),
    "greedy": (greedy_data, draw_greedy),
    "headline": (headline_data, draw_headline),
    "house": (house_data, draw_house),
    "tradeoff": (tradeoff_data, draw_tradeoff),
}


def photograph(browser: Any, report: Path, picture: Path) -> None:
    """The top of a report, from its heading to its first two charts, as a laptop shows it."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(report.resolve().as_uri())
    page.wait_for_selector("html[data-complete]", state="attached")
    foot = page.locator("#chart-time").bounding_box()
    height = foot["y"] + foot["height"] + 12
    page.screenshot(path=picture, clip={"x": 0, "y": 0, "width": 1280, "height": height})
    page.close()


def main() -> None:
    """Make README's picture from the report that the command line names."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        images = Path(__file__).parent.parent / "docs" / "images"
        photograph(browser, Path(sys.argv[1]), images / "page.png")
        browser.close()


if __name__ == "__main__":
    main()
