"""Transport over MPI, for sites whose launcher is `mpirun` (the paper's own choice)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from matcha.distributed.transports.transport import Message, Pending, Transport
from matcha.errors import PackageError, missing_package

__all__ = ["MpiTransport"]


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
        self._byte = MPI.BYTE
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

    def close(self) -> None:
        """Free the communicator; a collective call."""
        self._communicator.Free()


class _Requests(Pending):
    def __init__(self, transport: MpiTransport, requests: list[tuple[int, Any]]) -> None:
        self.transport = transport
        self.requests = requests

    def wait(self, timeout: float) -> None:
        # MPI has no wait with a time limit. Spin first (most answers are near), then give way.
        started = time.monotonic()
        while True:
            self.requests = [(peer, r) for peer, r in self.requests if not r.Test()]
            if not self.requests:
                return
            waited = time.monotonic() - started
            if waited > timeout:
                peer = self.requests[0][0]
                raise self.transport.failure(peer, f"did not answer within {timeout:g} s", 0.0)
            time.sleep(0.0 if waited < 1e-3 else 1e-4)


def _buffer(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    return tensor.detach().view(-1).view(torch.uint8).numpy()
