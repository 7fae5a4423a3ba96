"""`python -m reproduction FIGURE`: make a figure of the paper and judge the paper's claims."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from matcha.cli import options as opt
from matcha.cli import run
from matcha.cli.output import check_writable, console, make_folder, patient_progress, print_json
from matcha.errors import InputError

if TYPE_CHECKING:
    from reproduction.trials import Result, Trial


app = typer.Typer(
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def reproduce(
    figure: str = typer.Argument(..., help="fig1, fig3, fig4 or fig5."),
    quick: bool = typer.Option(
        False, "--quick", help="Minutes on two CPU cores: digits instead of CIFAR and text."
    ),
    results: list[Path] = typer.Option(
        [], "--from", help="Use results of earlier trainings (.jsonl) instead of training."
    ),
    epochs: int | None = opt.EPOCHS,
    data: Path | None = opt.DATA,
    device: str = opt.DEVICE,
    compile: bool = opt.COMPILE,
    output: Path = opt.folder("runs/reproduce"),
    format: str = typer.Option("png", help="Of the figure: png, svg or pdf."),
    report: bool = opt.REPORT,
    as_json: bool = opt.JSON,
) -> None:
    """Make a figure of the paper again and judge the paper's claims by it.

    Writes the figure, a page that sets each claim beside what was measured, and the results. In
    full scale Figures 1, 4 and 5 train the paper's networks, which wants a GPU and the data sets.

    [bold]Examples[/]

      python -m reproduction fig3

      python -m reproduction fig5 --quick

      python -m reproduction fig4 --from benchmarks/results/reproduction/cifar100.jsonl
    """
    from rich.table import Table

    from matcha.report.figures import check_format
    from reproduction.campaign import Campaign
    from reproduction.figures import maker

    check_format(Path(f"figure.{format}"))
    make = maker(figure)
    campaign = Campaign(
        earlier=results, data=data, device=device, compile=compile, epochs=epochs, quick=quick
    )
    check_writable(output, output)
    asked: list[Trial] = []
    trained: list[Result] = []

    def train(trials: Sequence[Trial]) -> list[Result]:
        asked.extend(trials)
        found = list(_watched(campaign.run(trials), len(trials)))
        trained.extend(found)
        return found

    outcome = make(train, quick=quick)
    if results and asked and not trained:
        scale = "the quick" if quick else "the full-scale"
        raise InputError(f"the results given with --from are not of {scale} {figure}.")
    make_folder(output)
    written = outcome.write(output, format)
    if report:
        written += _pages(outcome.results, output, figure)
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


def _pages(results: Sequence[Result], output: Path, figure: str) -> list[Path]:
    """One page for each task and network: losses of different ones do not compare."""
    from matcha.report import write_report
    from reproduction.campaign import run_of

    written = []
    for task, topology in dict.fromkeys((r.trial.task, r.trial.topology) for r in results):
        place = topology.replace(":", "-").replace("/", "-")
        page = output / f"{figure}-{task}-{place}.html"
        with patient_progress(f"writing {page.name}") as progress:
            runs = [
                run_of(r) for r in results if (r.trial.task, r.trial.topology) == (task, topology)
            ]
            written.append(write_report(runs, page, progress=progress))
    return written


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


if __name__ == "__main__":
    run(app, "python -m reproduction")
