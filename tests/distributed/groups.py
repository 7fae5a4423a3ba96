"""Workers that are groups of processes, with what people put between the GPUs of a node.

As a script: `groups.py FOLDER`, two and four nodes of two processes, every kind one after another;
the processes of four nodes are also two nodes of four, with two kinds of parallelism inside.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

from matcha import Plan, families, plan
from matcha.distributed import Gossip
from matcha.errors import InputError

try:
    from torch.distributed.tensor import DTensor, Replicate, Shard
except ImportError:  # torch 2.4
    from torch.distributed._tensor import (  # type: ignore[attr-defined]
        DTensor,
        Replicate,
        Shard,
    )
SHARDS = hasattr(torch.cpu.Stream, "record_event")  # torch 2.4 to 2.6 shard on GPUs alone
if SHARDS:
    from torch.distributed.fsdp import fully_shard

__all__ = ["DTensor", "Replicate", "Shard"]  # wherever this torch keeps them

GPUS = 2  # processes a node
STEPS = 6
KINDS = {  # by nodes
    2: ("ddp", "fsdp", "fsdp-overlap", "tensor", "adam"),
    4: ("ddp", "fsdp", "hsdp", "fsdp-tensor"),
}
if not SHARDS:
    KINDS = {2: ("ddp", "tensor"), 4: ("ddp",)}
BATCHES = {"tensor": 1, "hsdp": 4}  # of a node: a tensor-parallel group's processes see the same


def nodes_of(kind: str, num_nodes: int) -> int:
    return 2 if kind in ("hsdp", "fsdp-tensor") else num_nodes


def make_plan(num_nodes: int) -> Plan:
    topology = families.path(2) if num_nodes == 2 else families.ring(num_nodes)
    return plan(topology, 0.7, "matcha", seed=1)


def make_model(kind: str) -> nn.Module:
    # Seven and one do not divide by two: uneven shards, and an empty one.
    size = 8 if "tensor" in kind else 7
    model = nn.Sequential(nn.Linear(5, size), nn.Tanh(), nn.Linear(size, 1)).double()
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.copy_(torch.linspace(-1, 1 + number, p.numel()).view(p.shape) / 3)
    return model


def batch(node: int, gpu: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * node + 100 * gpu + step)
    return torch.randn(4, 5, generator=generator, dtype=torch.float64)


def loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return (model(inputs)[:, 0] - inputs.sum(1)).square().mean()


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "adam":
        return torch.optim.AdamW(model.parameters(), lr=0.05)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def expected(kind: str, num_nodes: int) -> np.ndarray:
    """One model a node, the whole group's batch, and `Round.mix` after every step."""
    num_nodes = nodes_of(kind, num_nodes)
    num_batches = BATCHES.get(kind, 2)
    chosen = make_plan(num_nodes)
    models = [make_model(kind) for _ in range(num_nodes)]
    optimizers = [make_optimizer(kind, model) for model in models]
    for k in range(STEPS):
        before = rows(models)
        for node, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            losses = [loss(model, batch(node, number, k)) for number in range(num_batches)]
            (sum(losses) / num_batches).backward()
            optimizer.step()
        after = rows(models)
        round = chosen.round(k)
        footnote = kind == "fsdp-overlap"
        mixed = round.mix(before) + (after - before) if footnote else round.mix(after)
        for model, row in zip(models, mixed, strict=True):
            nn.utils.vector_to_parameters(torch.from_numpy(row), model.parameters())
    return rows(models)


def rows(models: list[nn.Module]) -> np.ndarray:
    return np.stack(
        [nn.utils.parameters_to_vector(m.parameters()).detach().numpy() for m in models]
    )


def whole(model: nn.Module) -> np.ndarray:
    """All of a model, on every process of its group."""
    values = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([value.detach().flatten() for value in values]).numpy()


def spread(kind: str, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    inside = mesh["gpu"]
    if kind == "ddp":
        return DistributedDataParallel(model, process_group=inside.get_group())
    if "tensor" in kind:
        parallelize_module(model, inside, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        inside = mesh["replica"] if kind == "fsdp-tensor" else None
    elif kind == "hsdp":  # copies of what is sharded
        inside = mesh["replica", "gpu"]
    if inside is not None:
        fully_shard(model[0], mesh=inside)
        fully_shard(model, mesh=inside)
    return model


def batch_number(kind: str, mesh: DeviceMesh) -> int:
    """Which of its node's batches a process sees."""
    gpu = 0 if "tensor" in kind else mesh["gpu"].get_local_rank()
    return gpu if mesh.ndim == 2 else mesh["replica"].get_local_rank() + 2 * gpu


def train(kind: str, mesh: DeviceMesh, folder: Path) -> dict[str, Any]:
    node, number = mesh["node"].get_local_rank(), batch_number(kind, mesh)
    chosen = make_plan(mesh["node"].size())
    model = spread(kind, make_model(kind), mesh)
    optimizer = make_optimizer(kind, model)
    overlap = kind == "fsdp-overlap"
    found: dict[str, Any] = {}
    saved = kind in ("adam", "ddp", "hsdp")
    with Gossip(
        model, optimizer, chosen, mesh=mesh["node"], timeout=150, overlap=overlap
    ) as gossip:
        for k in range(STEPS):
            if saved and k == 3:
                gossip.save(folder / kind)
            optimizer.zero_grad()
            loss(model, batch(node, number, k)).backward()
            optimizer.step()
        gossip.state.settle()
        meetings = sum(len(gossip.state.cursor._met(chosen.round(k))) for k in range(STEPS))
        found["bytes"] = gossip.state.exchange.bytes_sent / meetings
        found["x"] = whole(model)
        found["distance"] = gossip.consensus_distance()
        with gossip.averaged():
            found["average"] = whole(model)
        found["state"] = gossip.averaged_state_dict()
        own = whole(model)
        assert np.array_equal(own, found["x"])
        if saved:
            gossip.load(folder / kind)
            assert gossip.iteration == 3
            for k in range(3, STEPS):
                optimizer.zero_grad()
                loss(model, batch(node, number, k)).backward()
                optimizer.step()
            assert np.array_equal(whole(model), own), "resumed to other bits"
        if kind == "fsdp":
            check_dcp(model, mesh, folder / f"dcp-{node}")
    return found


def check_dcp(model: nn.Module, mesh: DeviceMesh, folder: Path) -> None:
    """Each worker saves its own model, all its processes together, and loads it again."""
    before = whole(model)
    group = mesh["gpu"].get_group()
    save_dcp({"model": model.state_dict()}, checkpoint_id=folder, process_group=group)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    state = {"model": model.state_dict()}
    load_dcp(state, checkpoint_id=folder, process_group=group)
    model.load_state_dict(state["model"])
    assert np.array_equal(whole(model), before)


def misuse(mesh: DeviceMesh) -> list[str]:
    """What a worker of several processes is told."""
    said = []
    chosen = make_plan(mesh["node"].size())
    for options, kind in (({}, "tensor"), ({"mesh": mesh}, "plain")):
        model = spread(kind, make_model(kind), mesh) if kind == "tensor" else make_model(kind)
        optimizer = make_optimizer("ddp", model)
        try:
            Gossip(model, optimizer, make_plan(dist.get_world_size()) if not options else chosen,
                   timeout=150, **options)  # fmt: skip
        except InputError as error:
            said.append(str(error))
    return said


def work(rank: int, num_nodes: int, folder: Path) -> None:
    """One process of a launch."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # around tensor parallelism
    warnings.filterwarnings("ignore", message="DTensor random operators may not")  # torch 2.4
    count = num_nodes * GPUS
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count
    )
    meshes = {2: init_device_mesh("cpu", (num_nodes, GPUS), mesh_dim_names=("node", "gpu"))}
    if num_nodes == 4:
        names = ("node", "replica", "gpu")
        meshes[4] = init_device_mesh("cpu", (2, 2, GPUS), mesh_dim_names=names)
    results: dict[str, Any] = {}
    for kind in KINDS[num_nodes]:
        results[kind] = train(kind, meshes[count // nodes_of(kind, num_nodes)], folder)
    results["misuse"] = misuse(meshes[2])
    torch.save(results, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def main(folder: str) -> None:
    """Every launch; processes are forked, since importing PyTorch twelve times takes a minute."""
    torch.set_num_threads(1)
    for num_nodes in KINDS:
        own = Path(folder) / str(num_nodes)
        own.mkdir()
        start_processes(work, (num_nodes, own), nprocs=num_nodes * GPUS, start_method="fork")


if __name__ == "__main__":
    main(*sys.argv[1:])
