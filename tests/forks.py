"""Scripts in processes that start with PyTorch imported: all forks of one, as workers' are."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from tests.signals import hear_ctrl_c

from matcha.distributed.launch.fork_server import ForkedProcess, ForkServer, can_be_forked
from matcha.distributed.launch.launcher import LocalWorkers

STRICT = str(Path(__file__).parent / "strict.py")


@cache
def _fork_server() -> ForkServer:
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:  # as in the background of a shell: new processes inherit it
        hear_ctrl_c()
    server = ForkServer(os.environ)  # ends with this process
    signal.signal(signal.SIGINT, before)
    return server


@cache
def forked_commands() -> Path:
    """A folder with `matcha`, `python` and `torchrun` as forks; see `forked_commands.py`."""
    folder = Path(tempfile.mkdtemp(prefix="commands-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    log, last = folder / "log", folder / "torchrun"
    script = str(Path(__file__).parent / "forked_commands.py")
    server = start_script(script, "--install", str(folder), environment=os.environ, log=log)
    while not (last.exists() and os.access(last, os.X_OK)):
        assert server.poll() is None, log.read_text()
        time.sleep(0.02)
    return folder


def start_script(
    script: str, *arguments: str, environment: Mapping[str, str], log: Path
) -> ForkedProcess | subprocess.Popen[bytes]:
    """`python -W error SCRIPT ARGUMENTS…` in the present folder, leading a group of its own."""
    command = [sys.executable, STRICT, script, *arguments]
    return start_command(command, environment=environment, log=log)


def start_command(
    command: Sequence[str], *, environment: Mapping[str, str], log: Path
) -> ForkedProcess | subprocess.Popen[bytes]:
    """A Python command in the present folder, leading a group of its own, and hearing Ctrl-C."""
    if can_be_forked(command):
        return _fork_server().start(command, environment, log, "wb")
    with log.open("wb") as file:
        return subprocess.Popen(
            command,
            env=environment,
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=hear_ctrl_c,
        )


class ScriptWorkers(LocalWorkers):
    """Local workers of `[SCRIPT, ARGUMENTS…]`."""

    def _start(self, rank: int) -> ForkedProcess | subprocess.Popen[bytes]:
        log = self._log(rank)
        assert log is not None
        return start_script(*self._command, environment=self._environment(rank), log=log)
