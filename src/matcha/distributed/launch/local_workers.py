"""Local workers: processes of one command on this machine that know of one another.

What `torchrun` sets, this sets: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT. A worker
ends with the process that started it, however that ends.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from matcha.distributed.launch.fork_server import (
    ForkedProcess,
    ForkServer,
    can_be_forked,
    end_with_parent,
    is_python,
)
from matcha.distributed.launch.main import ERROR_VARIABLE, read_error
from matcha.errors import ExchangeError, InputError

_log = logging.getLogger("matcha.launch")
_POLL = 0.02
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0  # seconds before a restart; each next is twice as long
_GRACE = 10.0  # seconds for the others to report what they saw, once one worker has failed
_MAIN = "import sys; from matcha.distributed.launch.main import run_main; run_main(sys.argv[1:])"


class LocalWorkers:
    """Processes of one command that know of one another; a context manager that leaves none behind.

    This process keeps the key-value store by which they meet, so that it outlives any of them and a
    port need not be guessed.

    Args:
        command: what each worker runs.
        num_workers: how many of them.
        environment: added to this process's own.
        logs: a folder for each worker's stdout and stderr, `worker-RANK.log`; by default they go
            where this process's own go.
        restarts: how often a worker that fails is started again, each time after a longer pause,
            while the others continue; whether they can is theirs to know.
        forked: whether workers are forked from one process that has imported torch, where the
            command allows it: many start sooner, share memory, and are back sooner.

    Attributes:
        processes: the workers' present processes, by rank.
        restarted: how often each worker was started again.
        order: ranks in the order in which they ended for good.
    """

    def __init__(
        self,
        command: Sequence[str],
        num_workers: int,
        *,
        environment: Mapping[str, str] | None = None,
        logs: Path | None = None,
        restarts: int = 0,
        forked: bool = False,
    ) -> None:
        if num_workers < 1:
            raise InputError(f"at least one worker must be started, not {num_workers}.")
        self._store = _loopback_store()
        self._errors = tempfile.TemporaryDirectory(prefix="matcha-")
        threads = max(1, (os.cpu_count() or 1) // num_workers)
        shared = {
            "OMP_NUM_THREADS": str(threads),
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "WORLD_SIZE": str(num_workers),
            "LOCAL_WORLD_SIZE": str(num_workers),
            **(environment or {}),
        }
        self.logs = logs
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)
        self._command, self._shared, self._restarts = list(command), shared, restarts
        self.restarted = [0] * num_workers
        self._own: dict[int, Mapping[str, str]] = {}
        self.order: list[int] = []
        self._due: dict[int, float] = {}
        self._is_stopping = False
        self.processes: list[subprocess.Popen[bytes] | ForkedProcess] = []
        self._server = ForkServer(shared) if forked and can_be_forked(self._command) else None
        try:
            for rank in range(num_workers):
                self.processes.append(self._start(rank))
        except BaseException:
            self.stop()
            raise

    def _start(self, rank: int) -> subprocess.Popen[bytes] | ForkedProcess:
        ranked = self._environment(rank)
        log = self._log(rank)
        mode = "ab" if self.restarted[rank] else "wb"
        if self._server is not None:
            return self._server.start(self._command, ranked, log, mode)
        command = self._command
        if is_python(command):
            command = [command[0], "-c", _MAIN, *command[1:]]
        with ExitStack() as stack:
            return subprocess.Popen(
                command,
                env=ranked,
                stdin=subprocess.DEVNULL,
                stdout=None if log is None else stack.enter_context(log.open(mode)),
                stderr=None if log is None else subprocess.STDOUT,
                start_new_session=True,  # its own group, so that its children end with it
                preexec_fn=end_with_parent if sys.platform.startswith("linux") else None,
            )

    def _environment(self, rank: int) -> dict[str, str]:
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **self._own.get(rank, {})}
        return {**self._shared, **own, ERROR_VARIABLE: str(self._error(rank))}

    def poll(self) -> list[int | None]:
        """Each worker's exit code, None while it runs; starts those again that failed and may.

        A worker that will be started again has none.
        """
        codes: list[int | None] = []
        now = time.monotonic()
        for rank, process in enumerate(self.processes):
            code = process.poll()
            if code and self.restarted[rank] < self._restarts and not self._is_stopping:
                pause = min(_FIRST_PAUSE * 2 ** self.restarted[rank], _LONGEST_PAUSE)
                if rank not in self._due:
                    _log.warning("worker %d ended with %d: again in %g s", rank, code, pause)
                if now >= self._due.setdefault(rank, now + pause):
                    del self._due[rank]
                    self.restart(rank)
                code = None
            if code is not None and rank not in self.order:
                self.order.append(rank)
            codes.append(code)
        return codes

    def add(self, environment: Mapping[str, str]) -> int:
        """Start a further worker, with some of its environment its own; its number."""
        rank = len(self.processes)
        self.restarted.append(0)
        self._own[rank] = environment
        self.processes.append(self._start(rank))
        return rank

    def restart(self, rank: int, environment: Mapping[str, str] | None = None) -> None:
        """Start a worker that has ended again, with some of its environment its own."""
        self.restarted[rank] += 1
        self._own[rank] = environment or self._own.get(rank, {})
        self.processes[rank] = self._start(rank)

    def _log(self, rank: int) -> Path | None:
        return None if self.logs is None else self.logs / f"worker-{rank}.log"

    def _error(self, rank: int) -> Path:
        return Path(self._errors.name) / f"error-{rank}"

    def last_words(self, rank: int) -> list[str]:
        """The last lines of a worker's error, or the last line of its log; none if it said none."""
        log = self._log(rank)
        lines = read_error(self._error(rank))
        if not lines and log is not None:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        return lines

    @property
    def ended(self) -> bool:
        """Whether all have ended, or one has failed, so that it is time to `wait`."""
        codes = self.poll()
        return None not in codes or (any(codes) and not self._restarts)

    def wait(self, timeout: float | None = None, grace: float = _GRACE) -> list[int]:
        """Wait for all to end and return their exit codes.

        Once one has failed, the others get `grace` seconds to end by themselves, then are stopped;
        with restarts they continue without it.

        Raises:
            ExchangeError: they did not end within `timeout` seconds; they are stopped first.
        """
        end = None if timeout is None else time.monotonic() + timeout
        failed: float | None = None
        while True:
            codes = self.poll()
            if all(code is not None for code in codes):
                return [code for code in codes if code is not None]
            now = time.monotonic()
            if failed is None and any(codes) and not self._restarts:
                failed = now
            if failed is not None and now > failed + grace:
                self.stop()
            elif end is not None and now > end:
                self.stop()
                raise ExchangeError(f"the workers did not end within {timeout:g} s.")
            time.sleep(_POLL)

    def stop(self) -> None:
        """End every worker that still runs: politely, then for certain."""
        self._is_stopping = True
        for number, patience in ((signal.SIGTERM, 3.0), (signal.SIGKILL, None)):
            running = [process for process in self.processes if process.poll() is None]
            for process in running:
                _signal_group(process, number)
                _signal_group(process, signal.SIGCONT)  # a stopped one hears nothing else
            for process in running:
                try:
                    process.wait(patience)
                except subprocess.TimeoutExpired:
                    break
        if self._server is not None:
            self._server.close()
        self._errors.cleanup()

    def __enter__(self) -> LocalWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _loopback_store() -> TCPStore:
    """A key-value store that only this machine reaches; by default it would listen to all."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port = listener.getsockname()[1]
    return TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=False,  # libuv's listens to no socket of ours in torch 2.4 to 2.6
    )


def _signal_group(process: subprocess.Popen[bytes] | ForkedProcess, number: signal.Signals) -> None:
    """Signal a running worker and whatever it started, such as loaders of data."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
