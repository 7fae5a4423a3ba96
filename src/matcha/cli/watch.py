"""`matcha watch`: a run's directory as a dashboard in the terminal."""

from __future__ import annotations

from pathlib import Path

import typer

from matcha.cli import app
from matcha.cli.options import Json
from matcha.cli.output import console, print_json


@app.command("watch")
def watch_command(
    run: Path = typer.Argument(..., help="A run's directory, or a folder of runs: the newest."),
    once: bool = typer.Option(False, "--once", help="Show the run as it is now and end."),
    refresh: float = typer.Option(0.5, help="Seconds between frames.", min=0.05),
    as_json: Json = False,
) -> None:
    """Watch a run: loss, consensus, throughput, and how busy each worker's links are.

    Ends by itself when the run is finished; Ctrl-C ends the view, never the run.

    [bold]Example[/]

      matcha watch runs/demo-20261115-1900
    """
    from matcha.report.watch import frame, latest, watch

    if as_json:
        from dataclasses import asdict

        found = latest(run)
        print_json(asdict(found.records[-1]) if found.records else None)
    elif once:
        console.print(frame(latest(run)))
    else:
        watch(run, refresh=refresh, console=console)
