from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.perceptrons import PLAN, double_step, flat, mlp
from torch import nn

from matcha import families, plan
from matcha.distributed import Gossip
from matcha.distributed.launch.placement import Placement, find_placement
from matcha.errors import InputError
from matcha.testing import MemoryNetwork, run_threads

LAUNCHERS = ("RANK", "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS")


def test_a_process_alone_trains_as_without_gossip(monkeypatch, caplog) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)

    def train(wrap: Callable[[nn.Module, Any], Any]) -> torch.Tensor:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        wrap(model, optimizer)
        for _ in range(5):
            double_step(model, optimizer, torch.ones(2, 4))
        return flat(model)

    gossips: list[Gossip] = []
    alone = train(lambda model, optimizer: gossips.append(Gossip(model, optimizer, PLAN)))
    assert torch.equal(alone, train(lambda model, optimizer: None))
    assert [r.message.split(":")[0] for r in caplog.records] == ["one process"]
    assert "torchrun --nproc-per-node=8" in caplog.text
    (gossip,) = gossips
    assert (gossip.rank, gossip.num_workers, gossip.iteration) == (0, 1, 5)
    assert gossip.consensus_distance() == 0
    assert torch.equal(gossip.averaged_state_dict()["0.weight"], gossip.state.modules[0].weight)
    gossip.detach()


def test_another_number_of_workers_is_refused() -> None:
    ring = plan(families.ring(4), 1.0, "vanilla")
    with pytest.raises(InputError, match="the plan is for 4 workers, but 3 were started"):
        find_placement(ring, MemoryNetwork(3).transport(0), None, 10)
    assert find_placement(ring, MemoryNetwork(4).transport(2), None, 10).transport.rank == 2


def test_a_workers_parts_add_up_and_keep_apart() -> None:
    """Four processes, two a worker: a sum over each worker's own, 1 + 2 and 3 + 4, on average."""

    def work(transport) -> tuple[float, Path]:
        placement = Placement(
            transport=transport, everyone=transport, part=transport.rank % 2, num_parts=2
        )
        return placement.sum(1.0 + transport.rank, 10), placement.folder("saved")

    sums, folders = zip(*run_threads(4, work), strict=True)
    assert sums == (5.0,) * 4
    assert folders[0] == folders[2] != folders[1] == folders[3]
    whole = Placement(
        transport=MemoryNetwork(1).transport(0), everyone=MemoryNetwork(1).transport(0)
    )
    assert whole.folder("saved") == Path("saved")
