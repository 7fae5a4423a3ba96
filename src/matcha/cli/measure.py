"""`matcha probe` and `matcha bench`: measure the links, and this machine."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from matcha._io.tables import Table
from matcha.cli import app
from matcha.cli import options as opt
from matcha.cli.help import Command
from matcha.cli.output import check_free, console, keeping, print_json, print_table
from matcha.errors import InputError, unknown_name
from matcha.topology import Topology, families

if TYPE_CHECKING:
    from matcha.distributed.elastic.probe import LinkMeasure

_RESULTS = "MATCHA_RESULTS"  # where benchmarks write; by themselves, beside their committed results
MAX_MB = 1e5
"""The largest message that is sent to measure a link: a hundred gigabytes."""


@app.command("probe", cls=Command)
def probe_command(
    topology: str = opt.topology(),
    output: Path = typer.Option(
        ..., "--output", "-o", help="Where to write the topology with link times (JSON)."
    ),
    message_mb: float = typer.Option(
        4.0, help="Size of a message: your model's parameters, in megabytes."
    ),
    repetitions: int = typer.Option(5, help="Measurements per link; the median counts."),
    timeout: float = opt.TIMEOUT,
    force: bool = opt.FORCE,
    as_json: bool = opt.JSON,
) -> None:
    """Measure latency and speed of every link between real workers.

    The topology that is written carries a time for each link, and how much of it is latency, which
    smaller messages do not save: `matcha plan` and `matcha tune` then choose links, budget and wire
    by the second.

    Alone, this command starts its workers on this machine. To measure a cluster, start it with the
    launcher that will start the training:

      torchrun --nnodes=4 … -m matcha.cli probe torus:2x4 -o network.json
    """
    if not 1e-6 <= message_mb <= MAX_MB:
        raise InputError(
            f"--message-mb is {message_mb}, but it must be positive, up to {MAX_MB:g}."
        )
    if not timeout > 0:
        raise InputError(f"the timeout is {timeout}, but it must be positive seconds.")
    if repetitions < 1:
        raise InputError(f"--repetitions is {repetitions}, but it must be 1 or more.")
    check_free(output, force)
    graph = families.parse(topology)
    from matcha.distributed.elastic.probe import probe
    from matcha.distributed.launch.launcher import launch
    from matcha.distributed.launch.placement import is_worker, worker_transport

    if not is_worker():  # each worker runs this very command again
        launch(["-m", "matcha.cli", *sys.argv[1:]], graph.num_workers)
        return
    with worker_transport() as transport:
        measures = probe(
            graph, transport, message_mb=message_mb, repetitions=repetitions, timeout=timeout
        )
    if transport.rank != 0:
        return
    timed = graph.with_link_times(
        [measure.seconds for measure in measures],
        [min(measure.latency, measure.seconds) for measure in measures],
    )
    check_free(output, force)
    with keeping() as results:
        results.write(output, timed.save)
        if as_json:
            print_json([{**asdict(measure), "mbps": measure.mbps} for measure in measures])
            return
        _print_measures(timed, measures)
        results.say()


def _print_measures(topology: Topology, measures: tuple[LinkMeasure, ...]) -> None:
    """A row per link, slowest first."""
    rows = [
        (
            "–".join(str(topology.labels[end]) for end in m.link),
            f"{1e3 * m.latency:.2f}",
            "–" if m.seconds_per_megabyte is None else f"{1e3 * m.seconds_per_megabyte:.2f}",
            "–" if m.mbps is None else f"{m.mbps:,.0f}",
            f"{1e3 * m.seconds:.1f}",
        )
        for m in sorted(measures, key=lambda m: -m.seconds)
    ]
    headings = ("link", "latency (ms)", "ms/MB", "Mbit/s", "time (ms)")
    print_table(Table(headings, rows), f"links of {topology}")
    if any(m.seconds_per_megabyte is None for m in measures):
        console.print(
            "–: this message took hardly longer than an empty one, so that it says nothing of the "
            "speed; measure with a larger --message-mb.",
            style="dim",
        )


@app.command("bench", cls=Command, context_settings={"ignore_unknown_options": True})
def bench_command(
    name: str | None = typer.Argument(None, help="Which benchmark; without one, list them."),
    arguments: list[str] | None = typer.Argument(None, help="Passed on to the benchmark."),
    as_json: bool = opt.JSON,
) -> None:
    """Measure this machine with the repository's benchmarks; each prints one table.

    Benchmarks live in the source checkout. What they write goes to the current folder, or where
    $MATCHA_RESULTS says, and never over the committed results ([cyan]benchmarks/results/[/]).

    [bold]Examples[/]

      matcha bench

      matcha bench planner --quick
    """
    known = _benchmarks()
    if name is None:
        about = {each: _first_line(file) for each, file in known.items()}
        if as_json:
            print_json(about)
        else:
            print_table(Table(("benchmark", "what it measures"), list(about.items())))
        return
    if name not in known:
        raise unknown_name("benchmark", name, known)
    source = str(Path(__file__).parents[2])
    path = os.pathsep.join(part for part in (source, os.environ.get("PYTHONPATH")) if part)
    command = [sys.executable, str(known[name]), *(arguments or [])]
    results = os.environ.get(_RESULTS, str(Path.cwd()))
    environment = {**os.environ, "PYTHONPATH": path, _RESULTS: results}
    done = subprocess.run(command, env=environment, check=False)
    raise typer.Exit(done.returncode)


def _benchmarks() -> dict[str, Path]:
    for root in (Path(__file__).parents[3], Path.cwd()):
        folder = root / "benchmarks"
        if (folder / "planner.py").is_file():
            files = sorted(folder.glob("*.py"))
            return {file.stem: file for file in files if file.stem != "harness"}  # what they share
    raise InputError(
        "the benchmarks are not in the installed package: run this from a clone of the repository."
    )


def _first_line(file: Path) -> str:
    return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").split("\n")[0]
