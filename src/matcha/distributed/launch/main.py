"""A worker's main program: a script or module, run so that its launcher learns why it failed."""

from __future__ import annotations

import json
import logging
import os
import runpy
import sys
import traceback
from pathlib import Path

from matcha.errors import ExchangeError, MatchaError

ERROR_VARIABLE = "MATCHA_ERROR_FILE"
"""Where a worker leaves the last lines of an error of its own."""
_LINES = 12


def run_main(arguments: list[str]) -> None:
    """Run a script, or `-m` and a module, with its arguments as `__main__`.

    An error that only follows from another worker's is one line and not a traceback.
    """
    is_module = arguments[0] == "-m"
    sys.argv = arguments[1:] if is_module else arguments
    sys.path[0] = os.getcwd() if is_module else str(Path(arguments[0]).resolve().parent)
    try:
        if is_module:
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(arguments[0], run_name="__main__")
    except ExchangeError as error:
        sys.last_value = error  # so that hooks at exit find the error
        print(f"worker {os.environ.get('RANK', '')}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except SystemExit as error:
        if error.code:
            sys.last_value = error
        raise
    except Exception as error:
        _leave(traceback.format_exception(error))
        raise


def report_error(error: MatchaError) -> None:
    """Let the launcher say what is wrong, once for all workers; without one, say so here."""
    if not _leave([str(error)]):
        print(f"matcha: {error}", file=sys.stderr)


def _leave(text: list[str]) -> bool:
    """Leave the last lines for the launcher; whether there is one that looks."""
    file = os.environ.get(ERROR_VARIABLE)
    if file is None:
        return False
    lines = "".join(text).rstrip().splitlines()[-_LINES:]
    Path(file).write_text(json.dumps(lines), encoding="utf-8")
    return True


def show_links() -> None:
    """Print when exchanging begins, which workers come and go, and which cannot be reached."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("matcha").setLevel(logging.INFO)


def read_error(file: Path) -> list[str]:
    """The last lines of a worker's error; none where it left none."""
    if not file.exists():
        return []
    lines: list[str] = json.loads(file.read_text(encoding="utf-8"))
    return lines
