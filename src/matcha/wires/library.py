"""The compiled kernels of wires, kernels.c: compile when the package is installed, find, load.

Needs Python's own modules alone: hatch_build.py runs it before anything is installed. A library's
name holds the digest of its source and the kind of machine, so that an old or a foreign one is
never loaded. Where there is none, torch does the same, several times slower.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import subprocess
import tempfile
from functools import cache
from pathlib import Path

_log = logging.getLogger("matcha")
_SOURCE = Path(__file__).with_name("kernels.c")
_FLAGS = ("-O3", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")


def path(folder: Path = _SOURCE.parent) -> Path:
    """Where the library of this source and this machine lies, if there is one."""
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:12]
    return folder / f"kernels-{platform.machine()}-{digest}.so"


def compile_kernels(folder: Path = _SOURCE.parent) -> str:
    """Compile the library with `CC`, or cc; returns why that failed, or nothing."""
    compiler = shlex.split(os.environ.get("CC") or "cc")
    target = path(folder)
    try:
        with tempfile.TemporaryDirectory(dir=folder) as unfinished:
            made = Path(unfinished, target.name)
            command = [*compiler, *_FLAGS, "-o", str(made), str(_SOURCE), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                return f"{shlex.join(command)}: {done.stderr.strip()}"
            for old in folder.glob(f"kernels-{platform.machine()}-*.so"):
                old.unlink(missing_ok=True)
            made.replace(target)
    except OSError as error:
        return str(error)
    return ""


@cache
def load(file: Path | None = None) -> ctypes.CDLL | None:
    """The library, or None, which is logged; calls to it let other threads of Python run."""
    pointer, size, integer, real = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_float
    try:
        library = ctypes.CDLL(str(file or path()))
    except OSError as error:
        _log.info("coded wires run on torch alone, slower than with compiled kernels: %s", error)
        return None
    arguments = {
        "matcha_encode": [
            *(pointer, size, pointer, real, real, integer, pointer, pointer, integer),
            *(pointer, pointer, pointer, pointer),
        ],
        "matcha_compare": [
            *(pointer, pointer, size, pointer, integer, pointer, integer, integer),
            *(pointer, pointer, pointer),
        ],
        "matcha_move": [pointer, size, integer, pointer, pointer, real, pointer],
        "matcha_meet": [pointer, pointer, pointer, size, pointer, pointer],
        "matcha_limit_lanes": [integer],
    }
    for name, types in arguments.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, None
    return library
