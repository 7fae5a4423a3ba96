"""Launching: one Python command as every worker, on this machine or on its share of several."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matcha.distributed.launch.local_workers import LocalWorkers
from matcha.distributed.launch.placement import KEYS_VARIABLE, PEERS_VARIABLE
from matcha.distributed.links.peers import Peers, free_ports
from matcha.errors import ExchangeError, InputError, WorkerError

_log = logging.getLogger("matcha.launch")

PLAN_VARIABLE = "MATCHA_PLAN"
"""Where a launcher leaves the path of the plan for the workers' scripts."""


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

    Ctrl-C, SIGTERM and SIGHUP to this process end the workers too. Call it from the main thread.

    Args:
        command: Python's own arguments: a script and its arguments, or `-m`, a module and its.
        num_workers: on all machines together.
        environment: added to this process's own.
        hosts: the machines, where there are several: then `torchrun` starts the workers.
        logs: a folder for what each local worker says; by default it goes to this terminal.
        meanwhile: called once with a function that says whether it is time to end, to follow local
            workers while they run.
        restarts: how often a local worker that fails is started again while the others go on.

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
