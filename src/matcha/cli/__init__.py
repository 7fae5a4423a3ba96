"""The command line: parse, call one library function, print."""

from __future__ import annotations

import sys
from importlib import import_module

import typer

from matcha.errors import MatchaError

app = typer.Typer(
    name="matcha",
    help="Plan, simulate and run decentralized SGD on any network within a communication budget.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_EXTRA = '"matcha-sgd[torch]"'
_OPTIONAL = {
    "torch": _EXTRA,
    "safetensors": _EXTRA,
    "sklearn": _EXTRA,
    "cryptography": '"matcha-sgd[keys]"',
    "mpi4py": '"matcha-sgd[mpi]"',
    "tensorboard": "tensorboard",
}
"""Packages that not every user has, and what to install for them."""


def _version(show: bool) -> None:
    if show:
        import matcha

        typer.echo(f"matcha {matcha.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Plan, simulate and run decentralized SGD on any network within a communication budget."""


def _register() -> None:
    """Each command lives in its own file and adds itself to `app` when imported."""
    for name in (
        "bench",
        "demo",
        "keys",
        "plan",
        "probe",
        "report",
        "reproduce",
        "simulate",
        "sweep",
        "train",
        "tune",
        "watch",
    ):
        import_module(f"matcha.cli.{name}")


def main() -> None:
    """The `matcha` command: one clear sentence and exit code 2 for bad input."""
    try:
        app(prog_name="matcha")  # also under `python -m matcha.cli`: help and completion
    except MatchaError as error:
        typer.echo(f"matcha: {error}", err=True)
        sys.exit(2)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _OPTIONAL:
            raise
        typer.echo(f"matcha: this needs {package}: pip install {_OPTIONAL[package]}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        typer.echo("matcha: stopped.", err=True)
        sys.exit(130)


_register()
