"""Environment: what the way this process was started says about the other workers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from matcha.distributed.transports.transport import Transport
from matcha.errors import InputError

__all__ = ["default_transport", "is_alone", "is_worker", "worker_transport"]

_MPI_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MPI_LOCALRANKID")


def is_worker() -> bool:
    """Whether a launcher (torchrun, srun with PMI, mpirun) started this process as one of many."""
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys() or _started_by_mpi()


def is_alone() -> bool:
    """Whether nothing says that there are other workers: no process group, no launcher."""
    return not is_worker() and not (dist.is_available() and dist.is_initialized())


def default_transport() -> Transport:
    """torch.distributed where it is initialised or torchrun started us, else MPI under `mpirun`.

    A process group that had to be started for it ends with the transport.

    Raises:
        InputError: nothing says that there are other workers.
        PackageError: MPI started us, but mpi4py is not installed.
    """
    if not dist.is_initialized() and not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        if _started_by_mpi():
            from matcha.distributed.transports.mpi_transport import MpiTransport

            return MpiTransport()
        raise InputError(
            "this process has no other workers to talk to: start the script with "
            "`torchrun --nproc-per-node=8 SCRIPT`, `matcha train SCRIPT` or `mpirun`."
        )
    from matcha.distributed.transports.torch_transport import TorchTransport

    if dist.is_initialized():
        return TorchTransport()
    dist.init_process_group(_backend())
    return TorchTransport(owns_default=True)


@contextmanager
def worker_transport() -> Iterator[Transport]:
    """The transport of a process that is one worker and nothing else; closed when all went well.

    After an error partners may be gone: closing together with them would hide it.
    """
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    transport = default_transport()
    yield transport
    transport.close()


def _started_by_mpi() -> bool:
    return any(name in os.environ for name in _MPI_VARIABLES)


def _backend() -> str:
    # NCCL refuses two processes on one GPU; gloo copies through the host's memory instead.
    enough = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return "nccl" if torch.cuda.is_available() and enough else "gloo"
