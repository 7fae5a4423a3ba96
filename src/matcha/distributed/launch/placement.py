"""Placement: which worker a process belongs to, and which part of that worker it is.

A worker may be a group of processes, such as the GPUs of a node with DDP, FSDP or tensor
parallelism between them. Each process then meets its counterparts, the processes that hold the same
part of other workers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from matcha.distributed.launch.environment import default_transport, is_alone, join_team
from matcha.distributed.links.joining import Joining
from matcha.distributed.links.transport import LinkTransport
from matcha.distributed.transports.base import Transport
from matcha.distributed.transports.collectives import agree, gather
from matcha.distributed.transports.memory import MemoryNetwork
from matcha.distributed.transports.torch import TorchTransport
from matcha.errors import InputError
from matcha.plans import PlanLike
from matcha.records import versions

__all__ = ["Placement", "find_placement"]

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

    def close(self) -> None:
        """Close the transports that were opened for this placement."""
        for transport in self.owned:
            transport.close()

    def abandon(self) -> None:
        """After an error, close what needs no other worker: a listener would keep its port."""
        for transport in self.owned:
            if isinstance(transport, LinkTransport):
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

    Raises:
        InputError: the plan is for another number of workers, or the mesh is not a line.
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
            f"the plan is for {plan.num_workers} workers, but {found} were "
            f"started: start {plan.num_workers}, or make a plan for {found}."
        )


def shared_facts(plan: PlanLike, placement: Placement, options: str) -> dict[str, str]:
    """Return what must be the same on every worker before it meets another."""
    mesh = f"{placement.transport.num_workers} workers of {placement.num_parts} processes"
    return {**own_facts(plan, options), "mesh": mesh}


def own_facts(plan: PlanLike, options: str) -> dict[str, str]:
    """What of it a worker knows before it has a place among the others."""
    return {
        "plan": plan.digest[:12],
        "seed": str(plan.seed),
        "options": options,
        "matcha version": versions().get("matcha-sgd", "unknown"),
        "torch version": torch.__version__.split("+")[0],
    }
