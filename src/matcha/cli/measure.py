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
from matcha.cli.output import check_free, console, keeping, print_json, print_table, this_command
from matcha.errors import InputError, unknown_name
from matcha.topology import Topology, families

if TYPE_CHECKING:
    from matcha.distributed.elastic.probe import LinkMeasure

_RESULTS = "MATCHA_RESULTS"  # where benchmarks write; by themselves, beside their committed results
MAX_MB = 1e5
"""The largest message that is sent to measure a link: a hundred gigabytes."""


@app.command("probe", cls=Command)
def probe_command(
    topology: opt.TopologyArgument,
    output: Path = typer.Option(
        ..., "--output", "-o", help="Where to write the topology with link times (JSON)."
    ),
    message_mb: float = typer.Option(
        4.0, help="Size of a message: your model's parameters, in megabytes."
    ),
    repetitions: int = typer.Option(5, help="Measurements per link; the median counts."),
    timeout: opt.Timeout = 300.0,
    force: opt.Force = False,
    as_json: opt.Json = False,
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

    if not is_worker():
        launch(this_command(), graph.num_workers)
        return
    with worker_transport() as transport:
        measures = probe(
            graph,
            transport,
            message_mb=message_mb,
            repetitions=repetitions,
            timeout=timeout,
        )
    if transport.rank == 0:
        timed = graph.with_link_times(
            [measure.seconds for measure in measures],
            [min(measure.latency, measure.seconds) for measure in measures],
        )
        check_free(output, force)
        with keeping() as results:
            results.write(output, timed.save)
            if as_json:
                print_json([{**asdict(measure), "mbps": measure.mbps} for measure in measures])
            else:
                print_measures(timed, measures)
                results.say()


def print_measures(topology: Topology, measures: tuple[LinkMeasure, ...]) -> None:
    """A row per link, slowest first."""
    rows = [
        (
            "–".join(str(topology.labels[end]) for end in measure.link),
            f"{1e3 * measure.latency:.2f}",
            _shown(measure.seconds_per_megabyte, 1e3, ".2f"),
            _shown(measure.mbps, 1.0, ",.0f"),
            f"{1e3 * measure.seconds:.1f}",
        )
        for measure in sorted(measures, key=lambda m: -m.seconds)
    ]
    headings = ("link", "latency (ms)", "ms/MB", "Mbit/s", "time (ms)")
    print_table(Table(headings, rows), f"links of {topology}")
    if any(measure.seconds_per_megabyte is None for measure in measures):
        console.print(
            "–: this message took hardly longer than an empty one, so that it says nothing of the "
            "speed; measure with a larger --message-mb.",
            style="dim",
        )


def _shown(value: float | None, factor: float, form: str) -> str:
    return "–" if value is None else format(factor * value, form)


@app.command("bench", cls=Command, context_settings={"ignore_unknown_options": True})
def bench_command(
    name: str | None = typer.Argument(None, help="Which benchmark; without one, list them."),
    arguments: list[str] | None = typer.Argument(None, help="Passed on to the benchmark."),
    as_json: opt.Json = False,
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
        _print_benchmarks(known, as_json)
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


def _print_benchmarks(known: dict[str, Path], as_json: bool) -> None:
    first_lines = {
        name: (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").split("\n")[0]
        for name, file in known.items()
    }
    if as_json:
        print_json(first_lines)
        return
    print_table(Table(("benchmark", "what it measures"), list(first_lines.items())))
