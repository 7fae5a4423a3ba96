"""Processes that start with PyTorch imported: forks of one that has done nothing else.

Importing it, with what the first optimizer imports, takes four seconds of a core in each process.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from matcha.distributed.local_workers import LocalWorkers, _end_with_parent

# The server runs no code of tests and starts no thread, so its forks are sound.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["matcha", "matcha.distributed", "torch._dynamo"])


class Fork:
    """`python -W error SCRIPT ARGUMENTS…`, as `subprocess.Popen` would have it.

    A context manager that leaves neither it nor what it started behind.
    """

    def __init__(
        self, script: str, *arguments: str, log: Path, cwd: Path, environment: Mapping[str, str]
    ) -> None:
        work = (script, arguments, log, cwd, dict(environment))
        self._process = _context.Process(target=_work, args=work)
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("fork", timeout or 0)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def __enter__(self) -> Fork:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.join()


class ForkedWorkers(LocalWorkers):
    """Local workers of a script, `[SCRIPT, ARGUMENTS…]`, that need not import PyTorch."""

    def _start(self, rank: int) -> Fork:
        assert self.logs is not None
        return Fork(
            *self._command,
            log=self.logs / f"worker-{rank}.log",
            cwd=Path.cwd(),
            environment={**self._shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )


def _work(
    script: str, arguments: tuple[str, ...], log: Path, cwd: Path, environment: dict[str, str]
) -> None:
    os.setsid()  # its own group, so that its children end with it
    if sys.platform.startswith("linux"):
        _end_with_parent()
    with log.open("wb") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    sys.stdout.reconfigure(line_buffering=True)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.path[:0] = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.argv = [script, *arguments]
    warnings.simplefilter("error")
    runpy.run_path(script, run_name="__main__")
