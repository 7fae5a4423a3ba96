"""Transport over MPI, for sites whose launcher is `mpirun` (the paper's own choice)."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from matcha.distributed.transports.base import Message, Pending, Transport
from matcha.errors import PackageError, missing_package

_LOOK = 1.0  # seconds between two looks at the notes of others
_PATIENCE = 1.0  # seconds for a note to leave
_numbers = count()  # of this process's transports: all processes make theirs together


class MpiTransport(Transport):
    """Messages over a duplicate of MPI's world communicator.

    Needs the extra `mpi` (mpi4py). MPI initialises on import, so construct this in the worker.
    With `overlap=True` the exchange runs on its own thread, which needs MPI_THREAD_MULTIPLE or
    SERIALIZED; mpi4py asks for MULTIPLE by default.
    """

    def __init__(self) -> None:
        try:
            from mpi4py import MPI
        except ModuleNotFoundError as error:
            raise missing_package(error) or error from error
        except (ImportError, RuntimeError) as error:  # mpi4py without an MPI library
            raise PackageError(
                f'mpi4py finds no MPI library ({error}): load one, or pip install "matcha-sgd[mpi]"'
            ) from error
        self._communicator: Any = MPI.COMM_WORLD.Dup()
        self._letters: Any = MPI.COMM_WORLD.Dup()
        self._number = next(_numbers)
        self._notes: dict[tuple[int, str], str] = {}
        self._leaving: list[tuple[Any, bytes]] = []
        self._byte, self._status = MPI.BYTE, MPI.Status
        self.rank = self._communicator.Get_rank()
        self.num_workers = self._communicator.Get_size()

    def post(self, messages: Sequence[Message]) -> Pending:
        """Start the messages as MPI requests."""
        comm = self._communicator
        requests = [
            (m.peer, comm.Irecv([_buffer(m.incoming), self._byte], source=m.peer, tag=m.tag))
            for m in messages
            if m.incoming is not None
        ]
        requests += [
            (m.peer, comm.Isend([_buffer(m.outgoing), self._byte], dest=m.peer, tag=m.tag))
            for m in messages
            if m.outgoing is not None
        ]
        return _Requests(self, requests)

    def set_note(self, key: str, value: str) -> None:
        """Send it to every other worker, which reads it in a long wait.

        No receiver needs to be there: so small a message leaves at once.
        """
        letter = json.dumps([self._number, key, value]).encode()
        others = [rank for rank in range(self.num_workers) if rank != self.rank]
        self._leaving += [
            (self._letters.Isend([letter, self._byte], dest=rank), letter) for rank in others
        ]
        end = time.monotonic() + _PATIENCE
        while self._leaving and time.monotonic() < end:
            self._leaving = [(r, letter) for r, letter in self._leaving if not r.Test()]

    def get_note(self, rank: int, key: str) -> str:
        """Read the letters that have arrived."""
        status, buffer = self._status(), bytearray(1 << 12)
        while (letter := self._letters.Improbe()) is not None:
            letter.Recv([buffer, self._byte], status)
            number, written, value = json.loads(buffer[: status.Get_count(self._byte)])
            if number == self._number:  # else from a transport that was closed
                self._notes[status.Get_source(), written] = value
        return self._notes.get((rank, key), "")

    def report_waiting_on(self, peer: int | None) -> None:
        """Publish nothing: this worker is about to end, and MPI may not outlive a send to it."""

    def close(self) -> None:
        """Free the communicators; a collective call."""
        self._communicator.Free()
        self._letters.Free()


class _Requests(Pending):
    def __init__(self, transport: MpiTransport, requests: list[tuple[int, Any]]) -> None:
        self.transport = transport
        self.requests = requests

    def wait(self, timeout: float) -> None:
        # MPI has no wait with a time limit. Spin first (most answers are near), then give way.
        started = time.monotonic()
        end, look = started + timeout, started + min(_LOOK, 0.2 * timeout)
        while True:
            self.requests = [(peer, r) for peer, r in self.requests if not r.Test()]
            if not self.requests:
                return
            now = time.monotonic()
            if now > look:
                look = now + min(_LOOK, 0.2 * timeout)
                end = self._patient_until(now, end, timeout)
            time.sleep(0.0 if now - started < 1e-3 else 1e-4)

    def _patient_until(self, now: float, end: float, timeout: float) -> float:
        """When to give up, according to the notes: later while a worker is away."""
        transport, peer = self.transport, self.requests[0][0]
        if any(transport.get_note(rank, "away") for rank in transport.members):
            return now + timeout
        if now > end or transport.get_note(peer, f"finished/{transport.period}"):
            if all(r.Test() for _, r in self.requests):  # its last messages came just now
                return end
            raise transport.failure(peer, f"did not answer within {timeout:g} s", 0.0)
        return end


def _buffer(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    return tensor.detach().view(-1).view(torch.uint8).numpy()
