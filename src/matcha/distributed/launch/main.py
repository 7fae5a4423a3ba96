"""A worker's main program: a script or module, run so that its launcher learns why it failed."""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from pathlib import Path

from matcha.errors import ExchangeError, MatchaError

__all__ = ["ERROR_VARIABLE", "read_error", "run_main"]

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
        sys.last_value = error  # whoever looks for an error at exit finds one
        print(f"worker {os.environ.get('RANK', '')}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except SystemExit as error:
        if error.code:
            sys.last_value = error
        raise
    except Exception as error:
        _write_error(error)
        raise


def _write_error(error: Exception) -> None:
    file = os.environ.get(ERROR_VARIABLE)
    if file is None:
        return
    if isinstance(error, MatchaError):
        lines = [str(error)]
    else:
        lines = "".join(traceback.format_exception(error)).rstrip().splitlines()[-_LINES:]
    Path(file).write_text(json.dumps(lines), encoding="utf-8")


def read_error(file: Path) -> list[str]:
    """The last lines of a worker's error; none where it left none."""
    if not file.exists():
        return []
    lines: list[str] = json.loads(file.read_text(encoding="utf-8"))
    return lines
