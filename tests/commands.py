"""Runs the command line in a real process."""

from __future__ import annotations

import os
import subprocess
import sys


def matcha_command(*arguments, cwd=None, timeout=120, **environment):
    """`matcha ARGUMENTS…` with a wide, colourless terminal."""
    return subprocess.run(
        [sys.executable, "-m", "matcha.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        env={**os.environ, "COLUMNS": "160", "NO_COLOR": "1", "TERM": "dumb", **environment},
    )
