"""Environment: what the way this process was started says about the other workers."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from matcha._io.keys import Keys
from matcha.distributed.links.joining import Joining
from matcha.distributed.links.peers import (
    DEFAULT_PORT,
    Peers,
    from_names,
    from_slurm,
    meet,
    read_peers,
)
from matcha.distributed.links.transport import LinkTransport
from matcha.distributed.transports.base import Transport
from matcha.errors import InputError
from matcha.topology import Topology

__all__ = [
    "JOIN_VARIABLE",
    "KEYS_VARIABLE",
    "LISTEN_VARIABLE",
    "LOSS_VARIABLE",
    "PEERS_VARIABLE",
    "REPLAN_VARIABLE",
    "TOKEN_VARIABLE",
    "LinkAddress",
    "ask_to_join",
    "default_transport",
    "is_alone",
    "is_worker",
    "join_team",
    "worker_transport",
]

PEERS_VARIABLE = "MATCHA_PEERS"
"""Says that workers talk over links of their own: a peers file, `slurm`, `rendezvous`, or a pattern
of names such as `matcha-{rank}.matcha:29600`."""
KEYS_VARIABLE = "MATCHA_KEYS"
"""The directory of keys for those links; without it they are plain TCP."""
LOSS_VARIABLE = "MATCHA_ON_LOSS"
"""What to do when a worker is lost, where a script does not say."""
REPLAN_VARIABLE = "MATCHA_REPLAN"
"""After how many iterations a plan follows the network, where a script does not say."""
JOIN_VARIABLE = "MATCHA_JOIN"
"""HOST:PORT of a worker of the running team in which to take part, where a script does not say."""
LISTEN_VARIABLE = "MATCHA_LISTEN"
"""HOST:PORT at which a worker that joins can be reached; by default its host and a free port."""
TOKEN_VARIABLE = "MATCHA_TOKEN"
"""What a worker shows that joins a team without keys; without it such a team takes in no others."""
_RANKS = ("RANK", "SLURM_PROCID")

_START = 300.0  # seconds for all workers to come to the rendezvous
_GROUPS = itertools.count()
_MPI_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MPI_LOCALRANKID")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkAddress:
    """Which worker this process is over links of our own, and where it finds the others."""

    peers: str
    """A peers file, `slurm`, `rendezvous`, or a pattern of names with `{rank}`."""
    rank: int | None = None
    """This worker's number; None: as the launcher's variables or the host's name say."""
    keys: Path | None = None
    """A directory of keys; None is plain TCP."""

    @classmethod
    def from_environment(cls) -> LinkAddress | None:
        """What a launcher's variables say; None where they name no peers."""
        if PEERS_VARIABLE not in os.environ:
            return None
        keys = os.environ.get(KEYS_VARIABLE)
        return cls(peers=os.environ[PEERS_VARIABLE], keys=Path(keys) if keys else None)

    def find_rank(self) -> int | None:
        """This worker's number; a pod of a StatefulSet has it at the end of its host's name."""
        if self.rank is not None:
            return self.rank
        for name in _RANKS:
            if name in os.environ:
                return int(os.environ[name])
        ordinal = socket.gethostname().rpartition("-")[2]
        return int(ordinal) if "{rank}" in self.peers and ordinal.isdigit() else None


def is_worker(address: LinkAddress | None = None) -> bool:
    """Whether this process is one of many, which a launcher (torchrun, srun, mpirun) started.

    Args:
        address: its own, where it was not left in the environment.
    """
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys() or _started_by_mpi():
        return True
    address = address or LinkAddress.from_environment()
    return address is not None and address.find_rank() is not None


def is_alone() -> bool:
    """Whether nothing says that there are other workers: no process group, no launcher."""
    return not is_worker() and not (dist.is_available() and dist.is_initialized())


def default_transport(
    topology: Topology | None = None, address: LinkAddress | None = None
) -> Transport:
    """torch.distributed where it is initialised or torchrun started us, else MPI under `mpirun`.

    A process group that had to be started for it ends with the transport. With an address, or where
    the environment names peers (MATCHA_PEERS), links of our own for the topology.

    Raises:
        InputError: nothing says that there are other workers.
        PackageError: MPI started us, but mpi4py is not installed.
    """
    address = address or LinkAddress.from_environment()
    if topology is not None and address is not None:
        return _links(topology, address)
    if not dist.is_initialized() and not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        if _started_by_mpi():
            from matcha.distributed.transports.mpi import MpiTransport

            return MpiTransport()
        raise InputError(
            "this process has no other workers to talk to: start the script with "
            "`torchrun --nproc-per-node=8 SCRIPT`, `matcha train SCRIPT` or `mpirun`."
        )
    from matcha.distributed.transports.torch import TorchTransport

    if dist.is_initialized():
        return TorchTransport()
    _start_group()
    return TorchTransport(owns_default=True)


@contextmanager
def worker_transport(
    topology: Topology | None = None, address: LinkAddress | None = None
) -> Iterator[Transport]:
    """The transport of a process that is one worker and nothing else; closed when all went well.

    After an error partners may be gone: closing together with them would hide it.
    """
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    transport = default_transport(topology, address)
    yield transport
    transport.close()


def ask_to_join(
    where: str, keys: Path | None = None, rank: int | None = None, listen: str | None = None
) -> Joining:
    """Ask a worker of a running team to take this process in.

    Args:
        where: HOST:PORT of any of its workers.
        keys: A directory of keys; None: as the environment says.
        rank: This worker's number; None: as the environment says, or as the team gives it.
        listen: HOST:PORT at which others reach it; None: as the environment says, or a free port.
    """
    found = os.environ.get(KEYS_VARIABLE)
    keys = keys or (Path(found) if found else None)
    rank = rank if rank is not None or "RANK" not in os.environ else int(os.environ["RANK"])
    if keys is not None and rank is None:
        own = [file.stem[len("worker-") :] for file in keys.glob("worker-*.key")]
        if len(own) != 1 or not own[0].isdigit():
            raise InputError(
                f"{str(keys)!r} holds the keys of {len(own)} workers: say which this one is "
                "(RANK, or --rank)."
            )
        rank = int(own[0])
    return Joining(
        where,
        rank=rank,
        keys=None if keys is None or rank is None else Keys(directory=keys, rank=rank),
        token=os.environ.get(TOKEN_VARIABLE, ""),
        listen=listen or os.environ.get(LISTEN_VARIABLE),
    )


def join_team(joining: Joining) -> LinkTransport:
    """Wait until a team has taken this process in, and make its links."""
    joined = joining.finish()
    topology, peers = joined.team.topology, joined.team.peers
    own: dict[str, Any] = {"keys": joining.keys, "timeout": joining.patience, "team": joined.team}
    return LinkTransport(topology, joined.rank, peers, **own)


def _links(topology: Topology, address: LinkAddress) -> LinkTransport:
    rank = address.find_rank()
    if rank is None:
        raise InputError("this worker has no number: set RANK, or give --rank.")
    keys = None if address.keys is None else Keys(directory=address.keys, rank=rank)
    peers = _find_peers(address.peers, rank, topology.num_workers)
    return LinkTransport(topology, rank, peers, keys=keys)


def _find_peers(where: str, rank: int, num_workers: int) -> Peers:
    if where == "slurm":
        return from_slurm()
    if where == "rendezvous":
        local = int(os.environ.get("LOCAL_RANK", "0"))
        loopback = os.environ.get("MASTER_ADDR") in ("127.0.0.1", "localhost")
        host = "127.0.0.1" if loopback else socket.gethostname()
        return meet(rank, num_workers, (host, DEFAULT_PORT + local), _START)
    if "{rank}" in where:
        names, _, port = where.rpartition(":") if ":" in where else (where, "", "")
        return from_names(names, num_workers, int(port) if port.isdigit() else DEFAULT_PORT)
    return read_peers(where)


def _start_group() -> None:
    # torch itself lets two groups, one after the other, read each other's addresses from the store;
    # so do processes that torchrun starts again while its store still holds the first ones'
    # addresses. Each group gets a name of its own, by what all workers count alike.
    store, rank, num_workers = _rendezvous()
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    named = PrefixStore(f"matcha/{restarts}/{next(_GROUPS)}", store)
    dist.init_process_group(_backend(), store=named, rank=rank, world_size=num_workers)


@cache
def _rendezvous() -> tuple[Store, int, int]:
    """The store that the launcher's variables lead to, kept for as long as the process."""
    store, rank, num_workers = next(rendezvous("env://"))
    return store, rank, num_workers


def _started_by_mpi() -> bool:
    return any(name in os.environ for name in _MPI_VARIABLES)


def _backend() -> str:
    # NCCL refuses two processes on one GPU; gloo copies through the host's memory instead.
    enough = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return "nccl" if torch.cuda.is_available() and enough else "gloo"
