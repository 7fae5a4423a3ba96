"""One process of a node of four; what all four do together is in test_groups.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from tests.distributed.groups import DTensor, Replicate, Shard
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from matcha.distributed.exchange.buckets import is_sharded, local, part_weight, shard_like


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        yield init_device_mesh("cpu", (2, 2))
    finally:
        dist.destroy_process_group()


def test_a_shard_counts_for_itself_and_a_copy_for_its_part(mesh) -> None:
    part = torch.arange(6.0).view(3, 2)
    spread = DTensor.from_local(part, mesh, [Shard(0), Shard(1)], run_check=False)
    copied = DTensor.from_local(part, mesh, [Replicate(), Shard(0)], run_check=False)
    assert part_weight(spread, 4) == 1
    assert part_weight(copied, 4) == 0.5
    assert part_weight(part, 4) == 0.25
    assert [is_sharded(tensor) for tensor in (spread, copied, part)] == [True, True, False]


def test_a_part_goes_back_to_where_it_came_from(mesh) -> None:
    whole = DTensor.from_local(torch.zeros(3, 2), mesh, [Replicate(), Shard(0)], run_check=False)
    again = shard_like(whole, local(whole) + 1)
    assert isinstance(again, DTensor)
    assert again.shape == whole.shape == (6, 2)
    assert again.placements == whole.placements
    assert torch.equal(local(again), torch.ones(3, 2))
    plain = torch.ones(2)
    assert shard_like(torch.zeros(2), plain) is plain
