"""Local workers: processes of one command on this machine that know of one another.

What `torchrun` sets, this sets: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from matcha.errors import ExchangeError, InputError

__all__ = ["LocalWorkers"]

_POLL = 0.02
_GRACE = 10.0  # seconds for the others to say what they saw, once one worker has failed


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
    """

    def __init__(
        self,
        command: Sequence[str],
        num_workers: int,
        *,
        environment: Mapping[str, str] | None = None,
        logs: Path | None = None,
    ) -> None:
        if num_workers < 1:
            raise InputError(f"at least one worker must be started, not {num_workers}.")
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "WORLD_SIZE": str(num_workers),
            "LOCAL_WORLD_SIZE": str(num_workers),
            **(environment or {}),
        }
        threads = max(1, (os.cpu_count() or 1) // num_workers)
        shared.setdefault("OMP_NUM_THREADS", str(threads))
        self.logs = logs
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)
        self.processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(num_workers):
                ranked = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                self.processes.append(self._start(command, ranked, rank))
        except BaseException:
            self.stop()
            raise

    def _start(
        self, command: Sequence[str], environment: Mapping[str, str], rank: int
    ) -> subprocess.Popen[bytes]:
        with ExitStack() as stack:
            log = self._log(rank)
            return subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=None if log is None else stack.enter_context(log.open("wb")),
                stderr=None if log is None else subprocess.STDOUT,
                start_new_session=True,  # its own group, so that its children end with it
            )

    def _log(self, rank: int) -> Path | None:
        return None if self.logs is None else self.logs / f"worker-{rank}.log"

    def last_words(self, rank: int) -> str | None:
        """The last line that a worker wrote to its log; None where there is no log or no line."""
        log = self._log(rank)
        if log is None:
            return None
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else None

    @property
    def ended(self) -> bool:
        """Whether all have ended, or one has failed, so that it is time to `wait`."""
        codes = [process.poll() for process in self.processes]
        return None not in codes or any(codes)

    def wait(self, timeout: float | None = None, grace: float = _GRACE) -> list[int]:
        """Wait for all to end and return their exit codes.

        Once one has failed, the others get `grace` seconds to end by themselves, then are stopped.

        Raises:
            ExchangeError: they did not end within `timeout` seconds; they are stopped first.
        """
        end = None if timeout is None else time.monotonic() + timeout
        failed: float | None = None
        while True:
            codes = [process.poll() for process in self.processes]
            if all(code is not None for code in codes):
                return [code for code in codes if code is not None]
            now = time.monotonic()
            if failed is None and any(codes):
                failed = now
            if failed is not None and now > failed + grace:
                self.stop()
            elif end is not None and now > end:
                self.stop()
                raise ExchangeError(f"the workers did not end within {timeout:g} s.")
            time.sleep(_POLL)

    def stop(self) -> None:
        """End every worker that still runs: politely, then for certain."""
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

    def __enter__(self) -> LocalWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal a running worker and whatever it started, such as loaders of data."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
