"""Launching: one Python command as every worker, on this machine or on its share of several.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from matcha.distributed.launch.fork_server import (
    ForkedProcess,
    ForkServer,
    can_be_forked,
    end_with_parent,
    is_python,
)
from matcha.distributed.launch.main import ERROR_VARIABLE, read_error
from matcha.distributed.launch.placement import KEYS_VARIABLE, PEERS_VARIABLE
from matcha.distributed.links.peers import Peers, free_ports
from matcha.errors import ExchangeError, InputError, WorkerError

PLAN_VARIABLE = "MATCHA_PLAN"
"""Where a launcher leaves the path of the plan for the workers' scripts."""
_log = logging.getLogger("matcha.launch")
_POLL = 0.02
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0  # seconds before a restart; each next is twice as long
_GRACE = 10.0  # seconds for the others to report what they saw, once one worker has failed
_MAIN = "import sys; from matcha.distributed.launch.main import run_main; run_main(sys.argv[1:])"
_Process = subprocess.Popen[bytes] | ForkedProcess


class LocalWorkers:
    """Processes of one command that know of one another; a context manager that leaves none behind.

    This process keeps the key-value store by which they meet, so that it outlives any of them and a
    port need not be guessed. With `logs` what worker 3 says goes to `worker-3.log` there. With
    `restarts` a worker that fails is started again so many times, after longer and longer pauses,
    while the others continue; whether they can is theirs to know. With `forked` workers are forks
    of one process that has imported torch, where the command allows it.
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
        self._shared = {
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // num_workers)),
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
        self._command, self._restarts = list(command), restarts
        self._own: dict[int, Mapping[str, str]] = {}  # environments
        self._due: dict[int, float] = {}  # when a worker that failed is started again
        self._is_stopping = False
        self.restarted: list[int] = []  # how often, by rank
        self.order: list[int] = []  # ranks as they ended for good
        self.processes: list[_Process] = []  # the present ones, by rank
        forks = forked and can_be_forked(self._command)
        self._server = ForkServer(self._shared) if forks else None
        try:
            for _ in range(num_workers):
                self.add({})
        except BaseException:
            self.stop()
            raise

    def _start(self, rank: int) -> _Process:
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
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **self._own[rank]}
        return {**self._shared, **own, ERROR_VARIABLE: str(self._error(rank))}

    def poll(self) -> list[int | None]:
        """Each worker's exit code, None while it runs or will; starts those again that may."""
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
        self._own[rank] = environment or self._own[rank]
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
        with restarts they continue without it. Those that take longer than `timeout` are stopped.
        """
        end = None if timeout is None else time.monotonic() + timeout
        failed: float | None = None
        while True:
            codes = self.poll()
            ended = [code for code in codes if code is not None]
            if len(ended) == len(codes):
                return ended
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


def _signal_group(process: _Process, number: signal.Signals) -> None:
    """Signal a running worker and whatever it started, such as loaders of data."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The machines that take part, each running the same command.

    >>> Hosts(number=4, rendezvous="host0:29400").share(8)
    2
    """

    number: int = 1
    rendezvous: str | None = None
    """HOST:PORT of one of several machines, where they meet."""
    rank: int | None = None
    """This machine's number, from 0, which is the one at the rendezvous; None: as they come."""

    def __post_init__(self) -> None:
        if self.number < 1:
            raise InputError(f"--hosts is {self.number}, but at least this machine takes part.")
        if (self.number > 1) != (self.rendezvous is not None):
            raise InputError("several machines need both --hosts and --rendezvous HOST:PORT.")
        if self.rendezvous is not None and not self.rendezvous.rpartition(":")[2].isdigit():
            raise InputError(f"--rendezvous is {self.rendezvous!r}, but it is HOST:PORT.")
        if self.rank is not None and not 0 <= self.rank < self.number:
            raise InputError(f"--host-rank is {self.rank}, but it is 0 to {self.number - 1}.")

    def share(self, num_workers: int) -> int:
        """How many of the workers run on this machine."""
        if num_workers % self.number:
            raise InputError(
                f"{num_workers} workers cannot be split evenly over {self.number} hosts."
            )
        return num_workers // self.number


def launch(
    command: Sequence[str],
    num_workers: int,
    *,
    environment: Mapping[str, str] | None = None,
    hosts: Hosts | None = None,
    logs: Path | None = None,
    meanwhile: Callable[[Callable[[], bool]], object] | None = None,
    restarts: int = 0,
) -> None:
    """Run a Python command as so many workers and wait until all have ended.

    The command is Python's own arguments: a script and its, or `-m`, a module and its. Where there
    are several hosts, `torchrun` starts the workers. `meanwhile` is called once, with a function
    that says whether it is time to end, to follow local workers while they run. Ctrl-C, SIGTERM and
    SIGHUP to this process end the workers too. Call it from the main thread.

    Raises:
        WorkerError: a worker ended with an exit code of its own, which is the error's.
        ExchangeError: a worker was lost.
    """
    hosts = hosts or Hosts()
    here = hosts.share(num_workers)
    if hosts.rendezvous is not None:
        _torchrun(command, here, hosts, environment or {})
        return
    with (
        _ending_politely(),
        LocalWorkers(
            [sys.executable, *command],
            num_workers,
            environment=environment,
            logs=logs,
            restarts=restarts,
            forked=num_workers > 1 or restarts > 0,
        ) as workers,
    ):
        if meanwhile is not None:
            meanwhile(lambda: workers.ended)
        codes = workers.wait()
        if restarts and 0 in codes:  # the others finished without the workers given up
            given_up = [rank for rank, code in enumerate(codes) if code]
            if given_up:
                _log.warning("workers %s were given up after %d restarts", given_up, restarts)
            return
        _raise_cause({rank: codes[rank] for rank in workers.order}, workers.last_words)


def local_links(num_workers: int, folder: Path, keys: Path | None = None) -> dict[str, str]:
    """The environment in which local workers talk over links of their own; writes a peers file."""
    host = "127.0.0.1"
    ports = free_ports(host, num_workers)
    peers = Peers(addresses=tuple((host, port) for port in ports))
    peers.save(folder / "peers")
    found = {PEERS_VARIABLE: str((folder / "peers").resolve())}
    return found | ({KEYS_VARIABLE: str(keys.resolve())} if keys else {})


def _raise_cause(codes: Mapping[int, int], last_words: Callable[[int], list[str]]) -> None:
    """Raise what happened to the worker whose end explains the others', given in their order."""
    failed = {rank: code for rank, code in codes.items() if code}
    if not failed:
        return
    rank = min(failed, key=lambda rank: _unlikeliness(failed[rank]))  # of equals the first to end
    words, code = last_words(rank), failed[rank]
    said = "." if not words else ":\n  " + "\n  ".join(words) if words[1:] else f": {words[0]}"
    if code < 0:
        raise ExchangeError(f"worker {rank} was ended by {signal.Signals(-code).name}{said}")
    if code == ExchangeError.exit_code:
        raise ExchangeError(f"worker {rank} lost another{said}")
    raise WorkerError(f"worker {rank} failed with exit code {code}{said}", exit_code=code)


def _unlikeliness(code: int) -> int:
    """How unlikely an end is the cause of the others' ends."""
    if code == -signal.SIGTERM:  # as we do to those who are left
        return 3
    if code == ExchangeError.exit_code:
        return 2
    return 1 if code > 0 or code == -signal.SIGABRT else 0


def _torchrun(
    command: Sequence[str], here: int, hosts: Hosts, environment: Mapping[str, str]
) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    assert hosts.rendezvous is not None
    module = ["--module", *command[1:]] if command[0] == "-m" else list(command)
    if hosts.rank is None:
        meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={hosts.rendezvous}"]
    else:
        address, _, port = hosts.rendezvous.rpartition(":")
        meeting = [f"--node-rank={hosts.rank}", f"--master-addr={address}", f"--master-port={port}"]
    before = dict(os.environ)
    os.environ.update(environment)  # torchrun passes this process's own to the workers
    try:
        torchrun([f"--nnodes={hosts.number}", f"--nproc-per-node={here}", *meeting, *module])
    except ChildFailedError as error:
        ended = sorted(error.failures.items(), key=lambda found: found[1].timestamp)
        _raise_cause({rank: failure.exitcode for rank, failure in ended}, lambda _: [])
        raise
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _ending_politely() -> Iterator[None]:
    """Let `kill` and a closed terminal end this process as Ctrl-C does: workers first."""

    def end(number: int, _: Any) -> None:
        sys.exit(128 + number)

    before = {s: signal.signal(s, end) for s in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
