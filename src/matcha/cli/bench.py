"""`matcha bench`: run one of the repository's benchmarks on this machine."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import typer
from rich.table import Table

from matcha.cli import app
from matcha.cli.options import Json
from matcha.cli.output import console
from matcha.errors import InputError, unknown_name

_RESULTS = "MATCHA_RESULTS"  # where benchmarks write; by themselves, beside their committed results


@app.command("bench", context_settings={"ignore_unknown_options": True})
def bench_command(
    name: str | None = typer.Argument(None, help="Which benchmark; without one, list them."),
    arguments: list[str] | None = typer.Argument(None, help="Passed on to the benchmark."),
    as_json: Json = False,
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
        _print(known, as_json)
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
            return {file.stem: file for file in sorted(folder.glob("*.py"))}
    raise InputError(
        "the benchmarks are not in the installed package: run this from a clone of the repository."
    )


def _print(known: dict[str, Path], as_json: bool) -> None:
    first_lines = {
        name: (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").split("\n")[0]
        for name, file in known.items()
    }
    if as_json:
        print(json.dumps(first_lines, indent=1))
        return
    table = Table("benchmark", "what it measures")
    for name, line in first_lines.items():
        table.add_row(name, line)
    console.print(table)
