"""`matcha sweep`: what each strategy promises at each budget."""

from __future__ import annotations

from rich.table import Table

from matcha.cli import app
from matcha.cli.options import (
    Budgets,
    Effort,
    Force,
    Json,
    Plot,
    Seed,
    Strategies,
    TopologyArgument,
    numbers,
    words,
)
from matcha.cli.output import (
    check_free,
    console,
    keeping,
    patient_progress,
    print_json,
    rho_in_words,
)
from matcha.strategies import COMPARED
from matcha.sweeps import DEFAULT_BUDGETS, Sweep, sweep
from matcha.topology import families


@app.command("sweep")
def sweep_command(
    topology: TopologyArgument,
    budgets: Budgets = [f"{b:g}" for b in DEFAULT_BUDGETS],
    strategies: Strategies = list(COMPARED),
    seed: Seed = 0,
    effort: Effort = "default",
    plot: Plot = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Compare strategies over communication budgets: the paper's Figures 1c and 3.

    The consensus error is what disagreement remains in the long run under unit gradient noise:
    compare strategies by it (lower is better). ρ is the contraction of disagreement per iteration,
    below 1 means consensus; of rounds that repeat in a cycle it is a mean over the cycle, which
    does not compare with the others and is marked so.

    [bold]Example[/]

      matcha sweep paper:geometric16-d10 --budget 0.1,0.3,0.5 --plot sweep.svg
    """
    from matcha.report import figures

    check_free(plot, force)
    if plot is not None:
        figures.check_format(plot)
    graph = families.parse(topology)
    with patient_progress("sweeping") as progress:
        points = sweep(
            graph,
            numbers(budgets),
            words(strategies),
            seed=seed,
            effort=effort,
            progress=progress,
        )
    with keeping() as keep:
        if plot is not None:
            drawn = figures.draw_sweep(points)
            plot = keep(plot, lambda path: figures.save_figure(drawn, path))
        if as_json:
            print_json(points.to_json())
            return
        _print(points)
        if plot is not None:
            console.print(f"wrote [cyan]{plot}[/]")


def _print(points: Sweep) -> None:
    unit = points.plans[0].timing.unit
    table = Table(title=str(points.topology), title_justify="left")
    for heading in ("strategy", "budget", f"{unit}/iteration", "consensus error", "rho", "weight"):
        table.add_column(heading, justify="left" if heading == "strategy" else "right")
    last = points.points[0].strategy
    for point, plan in zip(points, points.plans, strict=True):
        if point.strategy != last:
            table.add_section()
            last = point.strategy
        error = "–" if point.consensus_error is None else f"{point.consensus_error:.4g}"
        table.add_row(
            point.strategy,
            f"{point.budget:g}",
            f"{point.expected_comm_time:.4g}",
            error,
            rho_in_words(plan),
            f"{point.alpha:.4f}",
        )
    console.print(table)
