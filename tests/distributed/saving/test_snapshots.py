from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch
from tests.distributed.perceptrons import Fixed, double_step, mlp
from torch import nn

from matcha.distributed import Gossip, MemoryNetwork
from matcha.distributed.saving.snapshots import (
    average_snapshots,
    checksum,
    dump_snapshot,
    load_snapshot,
    restore_snapshot,
    write_snapshot,
)
from matcha.errors import DataError, InputError

PLAN = Fixed(2)


def worker(steps: int = 0, value: float = 1.0) -> Gossip:
    """One that has trained for some steps, with momentum to remember."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    gossip = Gossip(model, optimizer, PLAN, transport=MemoryNetwork(1).transport(0))
    for _ in range(steps):
        double_step(model, optimizer, torch.full((2, 4), value))
    return gossip


def weights(gossip: Gossip) -> torch.Tensor:
    return nn.utils.parameters_to_vector(gossip.model.parameters()).detach()


def test_a_worker_takes_over_anothers_state_and_place() -> None:
    old, new = worker(steps=3), worker()
    extra = load_snapshot(dump_snapshot(old, {"epoch": 7}), new)
    assert extra == {"epoch": 7}
    assert new.iteration == 3
    for gossip in (old, new):  # the momentum came along too
        double_step(gossip.model, gossip.optimizers[0], torch.ones(2, 4))
    assert torch.equal(weights(old), weights(new))


def test_the_average_of_files_is_that_of_their_models(tmp_path: Path) -> None:
    saved = [worker(2, value) for value in (0.5, 1.0, 1.5)]
    paths = [tmp_path / f"{k}.safetensors" for k in range(3)]
    for k, (path, gossip) in enumerate(zip(paths, saved, strict=True)):
        write_snapshot(path, gossip, {"first": k == 0}, {})
    fresh = worker(1)
    assert average_snapshots(paths, fresh) == {"first": True}
    torch.testing.assert_close(weights(fresh), torch.stack([*map(weights, saved)]).mean(0))
    assert not fresh.optimizers[0].state


def test_a_generator_goes_on_where_it_was(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(5)
    write_snapshot(tmp_path / "one", worker(), {}, {"data": random})
    expected = torch.rand(4, generator=random)
    restore_snapshot(tmp_path / "one", worker(), {"data": random})
    assert torch.equal(torch.rand(4, generator=random), expected)


def test_what_cannot_be_read_or_written_is_said(tmp_path: Path) -> None:
    content = b"no tensors here" * 100_000
    (tmp_path / "damaged").write_bytes(content)
    assert checksum(tmp_path / "damaged") == zlib.crc32(content)
    with pytest.raises(DataError, match="damaged cannot be read"):
        restore_snapshot(tmp_path / "damaged", worker(), {})
    strange = worker(1)
    strange.optimizers[0].param_groups[0]["when"] = object()
    with pytest.raises(InputError, match=r"'optimizer/param_groups/0/when' is a object"):
        dump_snapshot(strange, {})
