"""`strict.py SCRIPT ARGUMENTS…` is `python -W error SCRIPT ARGUMENTS…` for a forked process."""

from __future__ import annotations

import os
import runpy
import sys
import warnings
from pathlib import Path

if __name__ == "__main__":
    warnings.simplefilter("error")
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.argv = sys.argv[1:]
    script = sys.argv[0]
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [str(Path(script).resolve().parent), *path]
    runpy.run_path(script, run_name="__main__")
