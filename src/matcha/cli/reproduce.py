"""`matcha reproduce`: the paper's figures made again, each claim with its verdict."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from matcha.cli import app
from matcha.cli.output import console, print_json

if TYPE_CHECKING:
    from matcha.experiments.items import Result


@app.command("reproduce")
def reproduce_command(
    figure: str = typer.Argument(..., help="fig1, fig3, fig4 or fig5."),
    quick: bool = typer.Option(
        False, "--quick", help="Minutes on two CPU cores: digits instead of CIFAR and text."
    ),
    results: list[Path] = typer.Option(
        [], "--from", help="Use results of earlier trainings (.jsonl) instead of training."
    ),
    epochs: int | None = typer.Option(None, "--epochs", "-e", help="Of every training."),
    data: Path | None = typer.Option(None, help="Folder of the data sets; or $MATCHA_DATA."),
    device: str = typer.Option("auto", help="auto, cpu or cuda."),
    compile: bool = typer.Option(False, "--compile", help="CUDA: compile the model's blocks."),
    output: Path = typer.Option(Path("runs/reproduce"), "--output", "-o", help="Folder."),
    format: str = typer.Option("png", help="Of the figure: png, svg or pdf."),
    as_json: bool = typer.Option(False, "--json", help="Print the verdicts as JSON instead."),
) -> None:
    """Make a figure of the paper again and judge the paper's claims by it.

    Writes the figure, a page that sets each claim beside what was measured, and the results. In
    full scale Figures 1, 4 and 5 train the paper's networks, which wants a GPU and the data sets.

    [bold]Examples[/]

      matcha reproduce fig3

      matcha reproduce fig5 --quick

      matcha reproduce fig4 --from benchmarks/results/reproduction/cifar100.jsonl
    """
    from rich.table import Table

    from matcha.experiments.figures import maker
    from matcha.experiments.trainings import Trainings
    from matcha.report.figures import check_format

    check_format(Path(f"figure.{format}"))
    make = maker(figure)
    trainings = Trainings(
        earlier=results, data=data, device=device, compile=compile, epochs=epochs, quick=quick
    )
    outcome = make(lambda items: _watched(trainings.run(items), len(items)), quick=quick)
    written = outcome.write(output, format)
    if as_json:
        claims = [asdict(claim) for claim in outcome.claims]
        print_json({"claims": claims, "files": [str(path) for path in written]})
        return
    table = Table(title=outcome.title)
    for heading in ("claim", "measured", "verdict"):
        table.add_column(heading)
    for claim in outcome.claims:
        name = claim.statement if claim.source == "paper" else f"(ours) {claim.statement}"
        table.add_row(name, claim.measured, claim.verdict)
    console.print(table)
    for path in written:
        console.print(f"wrote {path}")


def _watched(results: Iterable[Result], number: int) -> Iterator[Result]:
    """The results as they come, counted on standard error."""
    from rich.console import Console
    from rich.progress import track

    return iter(
        track(
            results,
            "training",
            total=number,
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
            transient=True,
        )
    )
