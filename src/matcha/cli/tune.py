"""`matcha tune`: the strategy and budget that reach a target soonest."""

from __future__ import annotations

from pathlib import Path

import typer

from matcha.cli import app
from matcha.cli.output import check_free, console, patient_progress, print_json
from matcha.cli.plan import TOPOLOGY_HELP
from matcha.cli.sweep import _budgets as parse_budgets
from matcha.topology import families
from matcha.tuning import DEFAULT_BUDGETS, DEFAULT_STRATEGIES, Task, tune


@app.command("tune")
def tune_command(
    topology: str = typer.Argument(..., help=TOPOLOGY_HELP),
    compute_time: float = typer.Option(..., help="Seconds a worker computes in an iteration."),
    link_time: float | None = typer.Option(
        None, help="Seconds of one matching; not needed where the topology has link times."
    ),
    budgets: str = typer.Option(
        ",".join(f"{b:g}" for b in DEFAULT_BUDGETS), help="Values of C_b, separated by commas."
    ),
    strategies: str = typer.Option(
        ",".join(DEFAULT_STRATEGIES), help="Strategies, separated by commas."
    ),
    target: float = typer.Option(0.01, help="The wanted excess loss of workers' own models."),
    initial_gap: float = typer.Option(1.0, help="The excess loss at the start."),
    smoothness: float = typer.Option(1.0, help="L, the largest curvature of the loss."),
    strong_convexity: float | None = typer.Option(
        None, help="The smallest curvature, for strongly convex losses."
    ),
    gradient_variance: float = typer.Option(1.0, help="Variance of a worker's gradient."),
    dissimilarity: float = typer.Option(
        0.0, help="How far workers' expected gradients lie apart (unlike data), squared."
    ),
    overlap: bool = typer.Option(
        False, "--overlap", help="The exchange runs while the gradient is computed."
    ),
    seed: int = typer.Option(0, help="Decides the rounds and every search on the way."),
    effort: str = typer.Option("default", help="Search for matchings: none, default or high."),
    output: Path | None = typer.Option(None, help="Write the chosen plan to this JSON file."),
    plot: Path | None = typer.Option(
        None, help="Draw time an iteration against error to a .png, .svg or .pdf file."
    ),
    report: Path | None = typer.Option(None, help="Write a page (.html) to explore the plan."),
    force: bool = typer.Option(False, "--force", help="Overwrite files."),
    as_json: bool = typer.Option(False, "--json", help="Print the points as JSON instead."),
) -> None:
    """Choose strategy and budget: predict the time to a target for each, and take the best.

    [bold]Example[/]

      matcha tune paper:geometric16-d10 --compute-time 0.1 --link-time 0.05 --plot tune.svg
    """
    from matcha.report import figures, write_report

    check_free(output, force)
    check_free(plot, force)
    check_free(report, force)
    if plot is not None:
        figures.check_format(plot)
    graph = families.parse(topology)
    task = Task(
        smoothness=smoothness,
        strong_convexity=strong_convexity,
        gradient_variance=gradient_variance,
        dissimilarity=dissimilarity,
        initial_gap=initial_gap,
        target=target,
    )
    with patient_progress("tuning") as progress:
        found = tune(
            graph,
            compute_time=compute_time,
            link_time=link_time,
            task=task,
            strategies=[name.strip() for name in strategies.split(",") if name.strip()],
            budgets=parse_budgets(budgets),
            overlap=overlap,
            seed=seed,
            effort=effort,  # type: ignore[arg-type]  # checked by `plan`
            progress=progress,
        )
    if output is not None:
        found.plan.save(output)
    if plot is not None:
        found.plot(plot)
    if report is not None:
        with patient_progress("writing the report") as progress:
            write_report([], report, plans=[found.plan], progress=progress)
    if as_json:
        print_json(found.to_json())
        return
    console.print(found.table(), highlight=False, soft_wrap=True)
    for path in (output, plot, report):
        if path is not None:
            console.print(f"wrote [cyan]{path}[/]")
