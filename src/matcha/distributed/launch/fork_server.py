"""The fork server: a process that has imported what workers import, and forks one on request.

Importing torch takes seconds of processor time and a hundred megabytes per process. Forked from one
process that has done so, many workers start at once, share that memory, and are back sooner after a
failure. The server runs none of the workers' code, and holds no thread, file or device of theirs.

`torch.multiprocessing`'s forkserver starts workers as quickly (`benchmarks/basics.py`), but does
less than a launcher needs: it imports the launcher's own main module into every worker, passes
neither environment, folder, log nor session on, and lets workers outlive a killed launcher.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

from matcha.distributed.launch.main import run_main
from matcha.errors import WorkerError

_POLL = 0.02
_PR_SET_PDEATHSIG = 1
_MODULES = ("torch", "torch._dynamo", "matcha.distributed")  # every torch optimizer imports dynamo
_SERVE = "from matcha.distributed.launch.fork_server import serve; serve()()"


def is_python(command: Sequence[str]) -> bool:
    """Whether a command is this Python running a script or a module.

    >>> is_python([sys.executable, "-m", "this"]), is_python(["sleep", "600"])
    (True, False)
    """
    if len(command) < 2 or command[0] != sys.executable:
        return False
    return command[1] == "-m" or not command[1].startswith("-")


def can_be_forked(command: Sequence[str]) -> bool:
    """Whether a worker of this command can be forked; what GPU drivers keep survives no fork."""
    has_gpus = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()
    return sys.platform.startswith("linux") and not has_gpus and is_python(command)


def end_with_parent() -> None:
    """In a new process: have the kernel end it when its parent is gone, even by SIGKILL."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class ForkedProcess:
    """A forked worker, with what is used of `subprocess.Popen`."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server, self.pid = server, pid

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        return self._server.exit_code(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"worker process {self.pid}", timeout or 0.0)
            time.sleep(_POLL)
        return code

    def send_signal(self, number: int) -> None:
        """Signal it, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)


class ForkServer:
    """Starts workers by forking a process that has imported torch.

    The environment is that process's: some of it (threads) is read once, by what it imports.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._pipe, theirs = Pipe()
        self._codes: dict[int, int] = {}
        self._started: list[int] = []
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVE, str(theirs.fileno())],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is the launcher's to handle
                preexec_fn=end_with_parent,
            )

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path | None, mode: str
    ) -> ForkedProcess:
        """Fork a worker that runs a Python command; the first waits for the imports.

        Its output goes to the log, which is opened in that mode, or to this process's own output.
        """
        request = list(command[1:]), dict(environment), str(Path.cwd()), log and str(log), mode
        with suppress(ConnectionError):  # said below, once it is known how it ended
            self._pipe.send(request)
        while not self._started and self._process.poll() is None:
            self._receive(_POLL)
        if not self._started:
            code = self._process.wait()
            how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
            raise WorkerError(
                f"the process from which workers are forked has ended ({how}), and its workers "
                "with it: start the training again, with --resume where there is a checkpoint."
            )
        return ForkedProcess(self, self._started.pop())

    def exit_code(self, pid: int) -> int | None:
        """The exit code of a forked worker, or None while it runs."""
        if pid not in self._codes:
            is_gone = self._process.poll() is not None  # asked first: its last words still count
            self._receive(0.0)
            if is_gone:  # the kernel ends its workers then, and nothing tells how
                return self._codes.setdefault(pid, -signal.SIGTERM)
        return self._codes.get(pid)

    def _receive(self, timeout: float) -> None:
        with suppress(EOFError, ConnectionError):
            while self._pipe.poll(timeout):
                pid, code = self._pipe.recv()
                if code is None:
                    self._started.append(pid)
                else:
                    self._codes[pid] = code
                timeout = 0.0

    def close(self) -> None:
        """End it; workers must have ended before."""
        self._pipe.close()
        self._process.wait()


# -- in the server ---------------------------------------------------------------------------------


def serve() -> Callable[[], object]:
    """Fork workers until the launcher hangs up; returns in each of them, with what it runs."""
    launcher: Connection = Connection(int(sys.argv[1]))
    for name in _MODULES:
        importlib.import_module(name)
    gc.freeze()  # a collection in a worker would write to, and so copy, what all share
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker)
    while True:
        ready = wait([launcher, woken])
        if woken in ready:
            os.read(woken, 4096)
            with suppress(ChildProcessError):
                while (found := os.waitpid(-1, os.WNOHANG))[0]:
                    _report(launcher, found[0], os.waitstatus_to_exitcode(found[1]))
        if launcher not in ready:
            continue
        try:
            request = launcher.recv()
        except (EOFError, ConnectionError):
            return lambda: None
        pid = _fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            launcher.close()
            os.close(woken)
            os.close(waker)
            return _become(*request)
        _report(launcher, pid, None)


def _report(launcher: Connection, pid: int, code: int | None) -> None:
    # A launcher that was stopped receives nothing: the next word from it is that it has hung up.
    with suppress(ConnectionError):
        launcher.send((pid, code))


def _fork() -> int:
    """Fork; the parent continues when the child leads its own group, which may be signalled."""
    reading, writing = os.pipe()
    server = os.getpid()
    pid = os.fork()
    if pid:
        os.close(writing)
        os.read(reading, 1)  # also returns if the child is no more
        os.close(reading)
        return pid
    os.setsid()
    end_with_parent()
    if os.getppid() != server:
        os._exit(1)
    os.close(reading)
    os.close(writing)
    return 0


def _become(
    arguments: list[str], environment: Mapping[str, str], folder: str, log: str | None, mode: str
) -> Callable[[], object]:
    """Turn a new fork into the process that the command would start; returns what it runs."""
    if log is not None:
        flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if mode == "ab" else os.O_TRUNC)
        file = os.open(log, flags, 0o666)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python's own generator does so by itself
    return lambda: run_main(arguments)
