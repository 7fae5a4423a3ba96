"""The command line: parse, call one library function, print."""

from __future__ import annotations

import shutil
import sys
import textwrap
from contextlib import suppress
from importlib import import_module, metadata

import typer

from matcha.cli.help import Group
from matcha.errors import InputError, MatchaError, missing_package

app = typer.Typer(
    name="matcha",
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


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


def main() -> None:
    """Run the `matcha` command."""
    run(app, "matcha")  # the name also under `python -m matcha.cli`: help and completion


def run(app: typer.Typer, name: str) -> None:
    """Run a command; a failure is one sentence, and the exit code says what happened."""
    try:
        _check_import_name()
        app(prog_name=name)
    except MatchaError as error:
        _fail(error)
    except ModuleNotFoundError as error:
        missing = missing_package(error)
        if missing is None:
            raise
        _fail(missing)
    except MemoryError:
        _fail(InputError("there is not enough memory for this: choose fewer workers or links."))
    except (KeyboardInterrupt, SystemExit) as end:
        # typer answers Ctrl-C by an exit without a word.
        cause = getattr(end.__context__, "__cause__", None)
        if not isinstance(end, KeyboardInterrupt) and not isinstance(cause, KeyboardInterrupt):
            raise
        typer.echo("matcha: stopped.", err=True)
        sys.exit(130)


def _check_import_name() -> None:
    """Refuse to run on a mixture of packages: two others on PyPI are imported as `matcha` too."""
    for rival in ("matcha", "matcha-tts"):
        with suppress(metadata.PackageNotFoundError):
            metadata.distribution(rival)
            raise InputError(
                f"the package {rival!r} is installed here and is imported as `matcha` too: they "
                "overwrite each other. Give matcha-sgd an environment of its own."
            )


def _fail(error: MatchaError) -> None:
    sentence = f"matcha: {error}"
    if sys.stderr.isatty():  # a log keeps it in one line
        width = shutil.get_terminal_size().columns
        first, *quoted = sentence.splitlines()  # a worker's last lines stay as they are
        first = textwrap.fill(first, width, break_long_words=False, break_on_hyphens=False)
        sentence = "\n".join([first, *quoted])
    typer.echo(sentence, err=True)
    sys.exit(error.exit_code)


# Commands add themselves to `app` when their file is imported.
for name in ("plan", "tune", "simulate", "train", "report", "measure", "keys", "demo"):
    import_module(f"matcha.cli.{name}")
