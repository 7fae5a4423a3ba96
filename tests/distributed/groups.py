"""Workers that are groups of processes, with what people put between the GPUs of a node.

As a script: `groups.py NUM_NODES FOLDER`, two processes a node, every kind one after the other.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from matcha import Plan, families, plan
from matcha.distributed import Gossip
from matcha.errors import InputError

GPUS = 2  # processes a node
STEPS = 6
KINDS = {2: ("ddp", "fsdp", "fsdp-overlap", "tensor", "adam"), 4: ("ddp", "fsdp")}  # by nodes


def make_plan(num_nodes: int) -> Plan:
    topology = families.path(2) if num_nodes == 2 else families.ring(num_nodes)
    return plan(topology, 0.7, "matcha", seed=1)


def make_model(kind: str) -> nn.Module:
    # Seven and one do not divide by two: uneven shards, and an empty one.
    size = 8 if kind == "tensor" else 7
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
    chosen = make_plan(num_nodes)
    models = [make_model(kind) for _ in range(num_nodes)]
    optimizers = [make_optimizer(kind, model) for model in models]
    for k in range(STEPS):
        before = rows(models)
        for node, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            # All of a tensor-parallel group's processes see one batch.
            gpus = [0] if kind == "tensor" else list(range(GPUS))
            optimizer.zero_grad()
            sum(loss(model, batch(node, gpu, k)) / len(gpus) for gpu in gpus).backward()
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
    if kind == "ddp":
        return DistributedDataParallel(model, process_group=mesh.get_group())
    if kind == "tensor":
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(kind: str, mesh: DeviceMesh, folder: Path) -> dict[str, Any]:
    node, gpu = mesh["node"].get_local_rank(), mesh["gpu"].get_local_rank()
    chosen = make_plan(mesh["node"].size())
    model = spread(kind, make_model(kind), mesh["gpu"])
    optimizer = make_optimizer(kind, model)
    overlap = kind == "fsdp-overlap"
    found: dict[str, Any] = {}
    saved = kind in ("adam", "ddp")
    with Gossip(
        model, optimizer, chosen, mesh=mesh["node"], deadline=60, overlap=overlap
    ) as gossip:
        for k in range(STEPS):
            if saved and k == 3:
                gossip.save(folder / kind)
            optimizer.zero_grad()
            loss(model, batch(node, 0 if kind == "tensor" else gpu, k)).backward()
            optimizer.step()
        gossip.settle()
        meetings = sum(len(gossip._itinerary._met(chosen.round(k))) for k in range(STEPS))
        found["bytes"] = gossip.exchange.bytes_sent / meetings
        found["x"] = whole(model)
        found["distance"] = gossip.consensus_distance()
        with gossip.averaged():
            found["average"] = whole(model)
        own = whole(model)
        assert np.array_equal(own, found["x"])
        if saved:
            gossip.load(folder / kind)
            assert gossip.iteration == 3
            for k in range(3, STEPS):
                optimizer.zero_grad()
                loss(model, batch(node, gpu, k)).backward()
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
    for options, kind in (({}, "fsdp"), ({"mesh": mesh}, "plain")):
        model = spread(kind, make_model(kind), mesh["gpu"]) if kind == "fsdp" else make_model(kind)
        optimizer = make_optimizer("ddp", model)
        try:
            Gossip(model, optimizer, make_plan(dist.get_world_size()) if not options else chosen,
                   deadline=60, **options)  # fmt: skip
        except InputError as error:
            said.append(str(error))
    return said


def main(num_nodes: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (int(num_nodes), GPUS), mesh_dim_names=("node", "gpu"))
    results = {kind: train(kind, mesh, Path(folder)) for kind in KINDS[int(num_nodes)]}
    results["misuse"] = misuse(mesh)
    torch.save(results, Path(folder) / f"{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
