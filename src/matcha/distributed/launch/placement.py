"""Placement: which worker this process is, and how it reaches the others.

The way a process was started says who the others are. A worker may be a group of processes, such as
the GPUs of a node with DDP, FSDP or tensor parallelism between them. Each process then meets its
counterparts, the processes that hold the same part of other workers.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count, zip_longest
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

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
from matcha.distributed.transports.collectives import agree, gather
from matcha.distributed.transports.emulation import MemoryNetwork
from matcha.distributed.transports.mpi import MpiTransport
from matcha.distributed.transports.torch import TorchTransport
from matcha.errors import InputError
from matcha.plans import PlanLike
from matcha.records import versions
from matcha.topology import Topology

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
_GROUPS = count()
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
        return cls(peers=os.environ[PEERS_VARIABLE], keys=_keys())

    def find_rank(self) -> int | None:
        """This worker's number; a pod of a StatefulSet has it at the end of its host's name."""
        if self.rank is not None:
            return self.rank
        for name in _RANKS:
            if name in os.environ:
                return int(os.environ[name])
        ordinal = socket.gethostname().rpartition("-")[2]
        return int(ordinal) if "{rank}" in self.peers and ordinal.isdigit() else None


def _keys() -> Path | None:
    found = os.environ.get(KEYS_VARIABLE)
    return Path(found) if found else None


def is_worker(address: LinkAddress | None = None) -> bool:
    """Whether this process is one of many, which a launcher (torchrun, srun, mpirun) started."""
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
            return MpiTransport()
        raise InputError(
            "this process has no other workers to talk to: start the script with "
            "`torchrun --nproc-per-node=8 SCRIPT`, `matcha train SCRIPT` or `mpirun`."
        )
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

    What is not given is as the environment says; else there are no keys, the team chooses a number,
    and others reach this process at a free port.
    """
    keys = keys or _keys()
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
    rank, team = joining.finish()
    return LinkTransport(
        team.topology,
        rank,
        team.peers,
        keys=joining.keys,
        timeout=joining.patience,
        team=team,
    )


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


_log = logging.getLogger("matcha")


@dataclass(frozen=True, kw_only=True)
class Placement:
    """One process's place among all workers."""

    transport: Transport
    """Connects the counterparts, one process per worker."""
    everyone: Transport
    """Connects all processes of all workers; the same where a worker is one process."""
    part: int = 0
    num_parts: int = 1
    """How many processes are one worker."""
    owned: tuple[Transport, ...] = ()
    """What must be closed in the end."""

    def agree(
        self, facts: dict[str, str], layout: str, parameters: Sequence[str], timeout: float
    ) -> None:
        """Check that all processes run the same thing, and counterparts hold the same part.

        `layout` is a digest of that part; `parameters` say what is in it, to name what differs.
        """
        mesh = f"{self.transport.num_workers} workers of {self.num_parts} processes"
        facts = {**facts, "mesh": mesh}
        if self.everyone is not self.transport:
            agree(self.everyone, facts, timeout)
        model = layout[:12]
        if len(set(gather(self.transport, layout.encode(), timeout))) > 1:
            found = gather(self.transport, json.dumps(list(parameters)).encode(), timeout)
            rows = zip_longest(*map(json.loads, found), fillvalue="no more parameters")
            place = next((k for k, row in enumerate(rows) if len(set(row)) > 1), None)
            if place is not None:
                model = parameters[place] if place < len(parameters) else "no more parameters"
        agree(self.transport, {**facts, "model": model}, timeout)

    def sum(self, value: float, timeout: float) -> float:
        """Return the sum of a value over a worker's processes, averaged over the workers."""
        values = [float(v) for v in gather(self.everyone, repr(value).encode(), timeout)]
        return sum(values) / len(values) * self.num_parts

    def folder(self, directory: str | Path) -> Path:
        """Return where counterparts save; each part of a worker has checkpoints of its own."""
        root = Path(directory)
        return root if self.num_parts == 1 else root / f"part-{self.part:03d}"

    def close(self, *, after_error: bool = False) -> None:
        """Close what was opened for this placement; after an error what needs no other worker."""
        for transport in self.owned:
            if not after_error or isinstance(transport, LinkTransport):  # it would keep its port
                transport.close()


def find_placement(
    plan: PlanLike,
    transport: Transport | None,
    mesh: DeviceMesh | None,
    timeout: float,
    joining: Joining | None = None,
) -> Placement:
    """Find this process's place: in a mesh, on the script's own transport, or on the default.

    Where it joins a running team, it waits until that has taken it in.
    """
    if mesh is not None:
        placement = _placement_in(mesh, timeout)
    elif transport is not None:
        placement = Placement(transport=transport, everyone=transport)
    else:
        own: Transport
        if joining is not None:
            own = join_team(joining)
        else:
            own = MemoryNetwork(1).transport(0) if is_alone() else default_transport(plan.topology)
        placement = Placement(transport=own, everyone=own, owned=(own,))
    if not (isinstance(placement.transport, LinkTransport) and placement.transport.team.stage):
        _check_workers(plan, placement.transport.num_workers)
    return placement


def _placement_in(mesh: DeviceMesh, timeout: float) -> Placement:
    if mesh.ndim != 1:
        raise InputError(
            f"mesh= has {mesh.ndim} dimensions, {mesh.mesh_dim_names}: give the one along which "
            "workers differ, for example mesh=mesh['node']."
        )
    everyone = TorchTransport("gloo")
    mine = json.dumps(mesh.mesh.tolist()).encode()
    found = [json.loads(ranks) for ranks in gather(everyone, mine, timeout)]
    transport = TorchTransport(teams=[list(team) for team in sorted({tuple(t) for t in found})])
    places = [team.index(rank) for rank, team in enumerate(found)]
    counts = {places.count(worker) for worker in set(places)}
    if len(counts) > 1:
        raise InputError("mesh= gives workers of different sizes: each needs as many processes.")
    part = places[: everyone.rank].count(transport.rank)
    return Placement(
        transport=transport,
        everyone=everyone,
        part=part,
        num_parts=counts.pop(),
        owned=(transport, everyone),
    )


def _check_workers(plan: PlanLike, found: int) -> None:
    if found == 1:
        _log.warning(
            "one process: Gossip exchanges nothing here; for the plan's %d workers start the "
            "script with `torchrun --nproc-per-node=%d SCRIPT`.",
            plan.num_workers,
            plan.num_workers,
        )
    elif found != plan.num_workers:
        raise InputError(
            f"the plan is for {plan.num_workers} workers, but {found} were started: start "
            f"{plan.num_workers}, or make a plan for {found}."
        )


def own_facts(plan: PlanLike, options: str) -> dict[str, str]:
    """What must be the same on every worker before it meets another, its place aside."""
    return {
        "plan": plan.digest[:12],
        "seed": str(plan.seed),
        "options": options,
        "matcha version": versions().get("matcha-sgd", "unknown"),
        "torch version": torch.__version__.split("+")[0],
    }
