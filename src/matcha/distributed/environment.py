"""Environment: which transport the way this process was started calls for."""

from __future__ import annotations

import importlib.util
import os

import torch
import torch.distributed as dist

from matcha.distributed.transports.transport import Transport
from matcha.errors import InputError

__all__ = ["default_transport", "is_alone"]

_MPI_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS")


def is_alone() -> bool:
    """Whether nothing says that there are other workers: no process group, no launcher."""
    launched = {"RANK", "WORLD_SIZE"} <= os.environ.keys() or _started_by_mpi()
    return not launched and not (dist.is_available() and dist.is_initialized())


def default_transport() -> Transport:
    """torch.distributed where it is initialised or torchrun started us, else MPI under `mpirun`.

    Raises:
        InputError: nothing says that there are other workers.
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

    if not dist.is_initialized():
        dist.init_process_group(_backend())
    return TorchTransport()


def _started_by_mpi() -> bool:
    started = any(name in os.environ for name in _MPI_VARIABLES)
    return started and importlib.util.find_spec("mpi4py") is not None


def _backend() -> str:
    # NCCL refuses two processes on one GPU; gloo copies through the host's memory instead.
    enough = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return "nccl" if torch.cuda.is_available() and enough else "gloo"
