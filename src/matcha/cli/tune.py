"""`matcha tune`: the strategy and budget that reach a target soonest."""

from __future__ import annotations

from pathlib import Path

import typer

from matcha.cli import app
from matcha.cli.options import (
    Budgets,
    ComputeTime,
    Effort,
    Force,
    Json,
    LinkTimeOrNone,
    Overlap,
    PlanFile,
    Plot,
    Seed,
    Strategies,
    TopologyArgument,
    numbers,
    words,
)
from matcha.cli.output import check_free, check_page, console, keeping, patient_progress, print_json
from matcha.topology import families
from matcha.tuning import DEFAULT_BUDGETS, DEFAULT_STRATEGIES, Problem, tune


@app.command("tune")
def tune_command(
    topology: TopologyArgument,
    compute_time: ComputeTime,
    link_time: LinkTimeOrNone = None,
    budgets: Budgets = [f"{b:g}" for b in DEFAULT_BUDGETS],
    strategies: Strategies = list(DEFAULT_STRATEGIES),
    target_gap: float = typer.Option(0.01, help="The wanted excess loss of workers' own models."),
    initial_gap: float = typer.Option(1.0, help="The excess loss at the start."),
    smoothness: float = typer.Option(1.0, help="L, the largest curvature of the loss."),
    strong_convexity: float | None = typer.Option(
        None, help="The smallest curvature, for strongly convex losses."
    ),
    gradient_variance: float = typer.Option(1.0, help="Variance of a worker's gradient."),
    dissimilarity: float = typer.Option(
        0.0, help="How far workers' expected gradients lie apart (unlike data), squared."
    ),
    overlap: Overlap = False,
    seed: Seed = 0,
    effort: Effort = "default",
    output: PlanFile = None,
    plot: Plot = None,
    page: Path | None = typer.Option(None, help="Write a page (.html) to explore the plan."),
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Choose strategy and budget: predict the time to a target for each, and take the best.

    [bold]Example[/]

      matcha tune paper:geometric16-d10 --compute-time 0.1 --link-time 0.05 --plot tune.svg
    """
    from matcha.report import figures, write_report

    check_free(output, force)
    check_free(plot, force)
    check_free(page, force)
    check_page(page)
    if plot is not None:
        figures.check_format(plot)
    graph = families.parse(topology)
    problem = Problem(
        smoothness=smoothness,
        strong_convexity=strong_convexity,
        gradient_variance=gradient_variance,
        dissimilarity=dissimilarity,
        initial_gap=initial_gap,
        target=target_gap,
    )
    with patient_progress("tuning") as progress:
        found = tune(
            graph,
            compute_time=compute_time,
            link_time=link_time,
            problem=problem,
            strategies=words(strategies),
            budgets=numbers(budgets),
            overlap=overlap,
            seed=seed,
            effort=effort,  # type: ignore[arg-type]  # checked by `plan`
            progress=progress,
        )
    with keeping() as keep:
        if output is not None:
            output = keep(output, found.plan.save)
        if plot is not None:
            plot = keep(plot, found.plot)
        if page is not None:
            with patient_progress("writing the report") as progress:
                page = keep(
                    page,
                    lambda path: write_report([], path, plans=[found.plan], progress=progress),
                )
        if as_json:
            print_json(found.to_json())
            return
        console.print(found.table(), highlight=False, soft_wrap=True)
        for path in (output, plot, page):
            if path is not None:
                console.print(f"wrote [cyan]{path}[/]")
