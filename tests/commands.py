"""Runs the command line: here, or in a process of its own where that is what a test is about."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

from tests.forks import forked_commands

from matcha.cli import main
from matcha.cli.output import console

TERMINAL = {"COLUMNS": "160", "NO_COLOR": "1", "TERM": "dumb"}  # wide and colourless


def matcha_fork(*arguments, cwd=None, timeout=240, **environment):
    """`matcha ARGUMENTS…` in a process of its own, a fork of one that has imported PyTorch."""
    return subprocess.run(
        [str(forked_commands() / "matcha"), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        env={**os.environ, **TERMINAL, **environment},
    )


def matcha_process(*arguments, cwd=None, timeout=120, **environment):
    """`matcha ARGUMENTS…` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "matcha.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        env={**os.environ, **TERMINAL, **environment},
    )


def matcha_command(*arguments, cwd=None, **environment):
    """`matcha ARGUMENTS…` in this process, which has imported PyTorch already."""
    settings = {**TERMINAL, **environment}
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        patch.dict(os.environ, settings),
        patch.object(sys, "argv", ["matcha", *map(str, arguments)]),
        patch.object(console, "_width", int(settings["COLUMNS"])),  # read when it was made
        _inside(cwd or Path.cwd()),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
