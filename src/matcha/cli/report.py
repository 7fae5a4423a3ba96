"""`matcha report` and `matcha watch`: runs in; a page, figures or a live dashboard out."""

from __future__ import annotations

import math
from dataclasses import asdict
from functools import partial
from pathlib import Path

import typer

from matcha.cli import app
from matcha.cli import options as opt
from matcha.cli.help import Command
from matcha.cli.output import check_places, console, keeping, make_folder, print_json
from matcha.errors import InputError, require, unknown_name
from matcha.plans import load_plan

FORMATS = ("html", "png", "svg", "pdf")


@app.command("report", cls=Command)
def report_command(
    runs: list[Path] = typer.Argument(
        ..., help="Run directories, folders that hold some, or plans (.json) to explore."
    ),
    output: Path | None = typer.Option(
        None, "--output", "-o", help="The page (report.html), or the folder for figures (figures)."
    ),
    format: str = typer.Option("html", help="html: one page. png, svg, pdf: figures for papers."),
    title: str | None = typer.Option(None, help="The page's heading."),
    target_loss: float | None = typer.Option(
        None,
        help="Compare at this loss; by default the lowest that every run but the diverged reached.",
    ),
    explore: bool = typer.Option(
        False,
        "--explore",
        help="Plan all compared strategies at many budgets, for a slider on the page.",
    ),
    force: bool = opt.FORCE,
    as_json: bool = opt.JSON,
) -> None:
    """Turn runs into one self-contained page, or into figures for a paper.

    The page opens offline in any browser: results, curves, the topology with the plans that were
    run, timelines, and what it takes to do it all again. With --explore, a slider over budgets.

    [bold]Examples[/]

      matcha report runs/demo-* -o report.html
      matcha report runs/demo-* --format pdf -o figures

      matcha report plan.json -o plan.html
    """
    from matcha.report import compare, load_runs

    if target_loss is not None and not math.isfinite(target_loss):
        raise InputError(f"--target-loss is {target_loss}, but it must be a number.")
    if format not in FORMATS:
        raise unknown_name("format", format, FORMATS)
    if format != "html":
        require("matplotlib")
    plans = [load_plan(path) for path in runs if path.suffix == ".json"]
    folders = [path for path in runs if path.suffix != ".json"]
    found = load_runs(folders) if folders else []
    if format != "html" and not found:
        raise InputError("figures need runs; to draw a plan use `matcha plan --plot`.")
    place = output or Path("report.html" if format == "html" else "figures")
    if format == "html":
        check_places(force, page=place)
    else:
        make_folder(place)
        if not force and any(place.glob(f"*.{format}")):
            raise InputError(
                f"{str(place)!r} holds .{format} figures: choose another --output, or --force."
            )
    written: list[Path] = []
    with keeping() as results:
        if format == "html":
            options = {"title": title, "target_loss": target_loss, "explore": explore}
            results.page(place, found, plans=plans, **options)
            written = results.written
        else:
            from matcha.report.figures import write_figures

            draw = partial(write_figures, found, format=format, target_loss=target_loss)
            results.write(place, lambda folder: written.extend(draw(folder)))
        if as_json:
            comparison = compare(found, target_loss).to_json()
            print_json(comparison | {"written": [str(path) for path in written]})
            return
        for path in written:
            console.print(f"wrote [cyan]{path}[/] ({path.stat().st_size / 1e6:.2g} MB)")


@app.command("watch", cls=Command)
def watch_command(
    run: Path = typer.Argument(..., help="A run's directory, or a folder of runs: the newest."),
    once: bool = typer.Option(False, "--once", help="Show the run as it is now and end."),
    refresh: float = typer.Option(0.5, help="Seconds between frames.", min=0.05),
    as_json: bool = opt.JSON,
) -> None:
    """Watch a run: loss, consensus, throughput, and how busy each worker's links are.

    Ends by itself when the run is finished; Ctrl-C ends the view, never the run.

    [bold]Example[/]

      matcha watch runs/demo-20261115-1900
    """
    from matcha.report.watch import frame, latest, watch

    if as_json:
        found = latest(run)
        print_json(asdict(found.records[-1]) if found.records else None)
    elif once:
        console.print(frame(latest(run)))
    else:
        watch(run, refresh=refresh, console=console)
