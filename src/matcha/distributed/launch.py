"""Launching: several workers of one command on this machine.

For several hosts use `torchrun` (see docs/clusters.md); what it sets, this sets: RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR, MASTER_PORT.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from matcha.errors import ExchangeError, InputError

__all__ = ["LocalWorkers", "run_local"]

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
        outputs: where each worker's stdout and stderr go; by default to this process's own.
    """

    def __init__(
        self,
        command: Sequence[str],
        num_workers: int,
        *,
        environment: Mapping[str, str] | None = None,
        outputs: Sequence[IO[Any]] | None = None,
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
        self.processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(num_workers):
                output = outputs[rank] if outputs else None
                ranked = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                self.processes.append(
                    subprocess.Popen(
                        command,
                        env=ranked,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT if output is not None else None,
                        start_new_session=True,  # its own group, so that its children end with it
                    )
                )
        except BaseException:
            self.stop()
            raise

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


def run_local(
    command: Sequence[str], num_workers: int, *, environment: Mapping[str, str] | None = None
) -> list[int]:
    """Run a command as `num_workers` local workers and return their exit codes.

    Ctrl-C and SIGTERM to this process end the workers too. Call it from the main thread.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `with` cleans up
    try:
        with LocalWorkers(command, num_workers, environment=environment) as workers:
            return workers.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
