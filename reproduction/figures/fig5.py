"""Figure 5: three geometric graphs of sixteen workers, from sparse to dense."""

from __future__ import annotations

from matcha.training.settings import Delays
from reproduction.claims import Claim, judge
from reproduction.comparisons import Results
from reproduction.figures.drawing import axes, draw_loss
from reproduction.figures.fig4 import beats, same_accuracy, same_loss
from reproduction.figures.outcome import Outcome, Train
from reproduction.paper import GEOMETRIC, group


def reproduce(train: Train, *, quick: bool) -> Outcome:
    """Figure 5: loss against time and epochs on each graph."""
    chosen = group("digits16" if quick else "cifar10")
    results = Results.of(train(chosen.trials), chosen.task, chosen.delays)
    found = [t for t in GEOMETRIC if t in results.topologies]
    figure, grid = axes(max(1, len(found)), 2)
    claims: list[Claim] = []
    sections = {}
    for column, topology in enumerate(found):
        for row, time in enumerate((True, False)):
            draw_loss(grid[row, column], results, topology, time=time)
        short = topology.removeprefix("paper:")
        grid[0, column].set_title(short)
        grid[1, column].legend(frameon=False, fontsize=7, ncols=2)
        sections[short] = results.table(topology)
        claims += _claims(chosen.task, results, topology, GEOMETRIC[topology])
    if not quick:  # digits on two cores say nothing about how long the paper trained
        claims += times(results)
    return Outcome(
        name="fig5",
        title="Figure 5: three geometric graphs",
        figure=figure,
        claims=tuple(claims),
        sections=sections,
        results=results.results,
    )


def _claims(name: str, results: Results, topology: str, budget: float) -> list[Claim]:
    short = topology.removeprefix("paper:")
    return [
        same_loss(f"{name} on {short}", results, topology, budget),
        same_accuracy(f"{name} on {short}", results, topology, budget),
        beats(name, results, topology, "matcha", "periodic", budget),
        beats(name, results, topology, "greedy", "matcha", budget, source="ours"),
        beats(name, results, topology, "greedy", "matcha", 0.1, source="ours"),
    ]


def times(results: Results) -> list[Claim]:
    """How long 200 epochs take: vanilla's time grows with the density, matcha's does not."""
    if not results:
        return []
    steps = int(results.results[0].config["steps_per_epoch"])

    def minutes(topology: str, label: str) -> float | None:
        runs = results.seeds(topology, label)
        if not runs:
            return None
        units = runs[0].plan["expected_comm_time"]
        delays: Delays = results.delays
        each = (delays.compute_time or 0.0) + units * delays.link_time
        return float(200 * steps * each / 60)

    vanilla = [minutes(topology, "vanilla") for topology in GEOMETRIC]
    matcha = [minutes(t, f"matcha {budget:g}") for t, budget in GEOMETRIC.items()]
    if None in vanilla or None in matcha:
        return []
    growth = vanilla[-1] / vanilla[0]  # type: ignore[operator]
    spread = max(matcha) / min(matcha)  # type: ignore[type-var,operator]

    def shown(values: list[float | None]) -> str:
        return ", ".join(f"{value:.1f}" for value in values)

    return [
        Claim(
            statement="vanilla's 200 epochs take longer on denser graphs (13 to 22 minutes)",
            measured=f"{shown(vanilla)} minutes by the delay model",
            verdict=judge(growth, 1.3, nearly=1.1),
        ),
        Claim(
            statement="matcha's stay nearly the same (about 11 minutes)",
            measured=f"{shown(matcha)} minutes by the delay model",
            verdict=judge(spread, 1.2, nearly=1.4, at_least=False),
        ),
    ]
