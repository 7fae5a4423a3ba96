"""`matcha sweep`: what each strategy promises at each budget."""

from __future__ import annotations

from rich.table import Table

from matcha.cli import app
from matcha.cli import options as opt
from matcha.cli.help import Command
from matcha.cli.output import (
    check_free,
    console,
    explain_averages,
    keeping,
    patient_progress,
    print_json,
)
from matcha.strategies import COMPARED, strategy_with
from matcha.sweeps import DEFAULT_BUDGETS, Sweep, sweep
from matcha.topology import families


@app.command("sweep", cls=Command)
def sweep_command(
    topology: opt.TopologyArgument,
    budgets: opt.Budgets = [f"{b:g}" for b in DEFAULT_BUDGETS],
    strategies: opt.Strategies = list(COMPARED),
    wires: opt.Wires = ["float32"],
    alpha: opt.Alpha = "error",
    switch: opt.Switch = False,
    seed: opt.Seed = 0,
    effort: opt.Effort = "default",
    plot: opt.Plot = None,
    force: opt.Force = False,
    as_json: opt.Json = False,
) -> None:
    """Compare strategies over communication budgets: the paper's Figures 1c and 3.

    The consensus error is what disagreement remains in the long run under unit gradient noise:
    compare strategies by it (lower is better). Every strategy has the mixing weight that is best
    for it, or with --alpha rho for ρ, as in the paper. ρ is the contraction of disagreement per
    iteration, below 1 means consensus; of rounds that repeat in a cycle it is a mean over the
    cycle, which does not compare with the others and is marked so. Over a smaller wire the same
    budget, which is time, buys more rounds; the consensus error includes what the wire leaves of a
    difference.

    [bold]Example[/]

      matcha sweep paper:geometric16-d10 --budget 0.1,0.3,0.5 --plot sweep.svg

      matcha sweep paper:er8 -s greedy -b 0.02,0.1 --wire float32,modulo:3
    """
    from matcha.report import figures

    check_free(plot, force)
    opt.check_alpha(alpha)
    if plot is not None:
        figures.check_format(plot)
    with patient_progress("reading the network"):
        graph = families.parse(topology)
    with patient_progress("sweeping") as progress:
        points = sweep(
            graph,
            opt.numbers(budgets),
            [strategy_with(n, effort=effort, switch=switch) for n in opt.words(strategies)],
            wires=opt.words(wires),
            alpha=alpha,  # type: ignore[arg-type]  # checked by strategies
            seed=seed,
            progress=progress,
        )
    with keeping() as keep:
        if plot is not None:
            drawn = figures.draw_sweep(points)
            plot = keep(plot, lambda path: figures.save_figure(drawn, path))
        if as_json:
            print_json(points.to_json())
            return
        _print(points, alpha)
        if plot is not None:
            console.print(f"wrote [cyan]{plot}[/]")


def _print(points: Sweep, alpha: str) -> None:
    found = points.table()
    table = Table(title=str(points.topology), title_justify="left")
    for heading, right in zip(found.headings, found.numeric, strict=True):
        table.add_column(heading, justify="right" if right else "left")
    last = points.points[0]
    for point, cells in zip(points, found.rows, strict=True):
        if (point.strategy, point.wire) != (last.strategy, last.wire):
            table.add_section()
        last = point
        table.add_row(*cells)
    console.print(table)
    explain_averages(points.plans)
    console.print(f"Every strategy has the mixing weight that is best for {opt.BEST_FOR[alpha]}.")
    for note in points.notes:
        console.print(note)
