"""Figure 4 (and Appendix A): budgets from 0.5 to 0.02 on eight workers, three tasks."""

from __future__ import annotations

from typing import Any

from reproduction.claims import Claim, judge
from reproduction.comparisons import Results
from reproduction.figures.drawing import axes, draw_loss
from reproduction.figures.fig1 import early_headline, headline, sensitivity
from reproduction.figures.outcome import Outcome, Train
from reproduction.paper import ER8, group


def reproduce(train: Train, *, quick: bool) -> Outcome:
    """Figure 4: loss against time and against epochs, for each task."""
    groups = [group(name) for name in (["digits8"] if quick else ["cifar100", "ptb"])]
    found = {g.task: Results.of(train(g.trials), g.task, g.delays) for g in groups}
    found = {name: results for name, results in found.items() if results}
    figure, grid = axes(max(1, len(found)), 2)
    claims: list[Claim] = []
    sections = {}
    for column, (name, results) in enumerate(found.items()):
        for row, time in enumerate((True, False)):
            draw_loss(grid[row, column], results, ER8, time=time)
        grid[0, column].set_title(name)
        grid[1, column].legend(frameon=False, fontsize=7, ncols=2)
        name_longer_runs(grid[0, column])
        sections[f"{name} on er8"] = results.table(ER8)
        heading = f"{name}: gain in simulated time, by speed of links"
        sections[heading] = sensitivity(results, ER8)
        claims += claims_of(name, results)
    return Outcome(
        name="fig4",
        title="Figure 4: budgets",
        figure=figure,
        claims=tuple(claims),
        sections=sections,
        results=tuple(r for results in found.values() for r in results.results),
    )


def name_longer_runs(ax: Any) -> None:
    """A legend for the faint lines, which the panel against epochs does not have."""
    lines, labels = ax.get_legend_handles_labels()
    longer = [(line, label) for line, label in zip(lines, labels, strict=True) if "×" in label]
    if longer:
        ax.legend(*zip(*longer, strict=True), frameon=False, fontsize=7, loc="lower left")


def claims_of(name: str, results: Results) -> list[Claim]:
    """What the paper says of Figure 4 and of Appendix A's Figures 6 and 7, for a task."""
    claims = [same_loss(name, results, ER8, 0.5)]
    if name != "ptb":
        claims.append(same_accuracy(name, results, ER8, 0.5))
        claims += [
            headline(results, ER8, 5.0),
            headline(results, ER8, 5.0, "greedy"),
            early_headline(results, ER8, 5.0),
            early_headline(results, ER8, 5.0, "greedy"),
        ]
    budgets = (0.1, 0.02)
    claims += [beats(name, results, ER8, "matcha", "periodic", b) for b in budgets]
    claims += [beats(name, results, ER8, "greedy", "matcha", b, source="ours") for b in budgets]
    return claims


def same_loss(name: str, results: Results, topology: str, budget: float) -> Claim:
    """Matcha's final training loss is vanilla's, or lower."""
    ours = results.final(topology, f"matcha {budget:g}", results.loss)
    theirs = results.final(topology, "vanilla", results.loss)
    ratio = None if ours is None or theirs is None else ours / theirs
    return Claim(
        statement=f"{name}: matcha {budget:g} has nearly vanilla's {results.loss_name}, or less",
        measured=f"{_short(ours)} against {_short(theirs)}",
        verdict=judge(ratio, 1.02, nearly=1.10, at_least=False),
    )


def same_accuracy(name: str, results: Results, topology: str, budget: float) -> Claim:
    """Matcha's final accuracy is within half a point of vanilla's, or higher."""
    ours = results.final(topology, f"matcha {budget:g}", "test_accuracy")
    theirs = results.final(topology, "vanilla", "test_accuracy")
    points = None if ours is None or theirs is None else 100 * (ours - theirs)
    return Claim(
        statement=f"{name}: matcha {budget:g} within 0.5 points of vanilla's accuracy",
        measured=_short(points, "+.1f", " points"),
        verdict=judge(points, -0.5, nearly=-1.0),
    )


def beats(
    name: str,
    results: Results,
    topology: str,
    better: str,
    worse: str,
    budget: float,
    source: str = "paper",
) -> Claim:
    """One strategy ends with a lower training loss than another at the same budget."""
    first = results.final(topology, f"{better} {budget:g}", results.loss)
    second = results.final(topology, f"{worse} {budget:g}", results.loss)
    ratio = None if first is None or second is None else first / second
    if first is not None and first == first and second is not None and second != second:
        ratio = 0.0  # the other one diverged
    where = "" if topology == ER8 else f" on {topology.removeprefix('paper:')}"
    return Claim(
        statement=f"{name}{where}: {better} below {worse} at C_b = {budget:g}",
        measured=f"{results.loss_name} {_short(first)} against {_short(second)}",
        verdict=judge(ratio, 1.0, nearly=1.02, at_least=False),
        source=source,
    )


def _short(value: float | None, form: str = ".4f", unit: str = "") -> str:
    if value is None:
        return "–"
    return f"{value:{form}}{unit}" if value == value else "divergence"
