from __future__ import annotations

import math
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.distributed.perceptrons import Fixed, double_step, mlp
from torch import nn

from matcha.distributed import Gossip
from matcha.distributed.snapshot import (
    average_snapshots,
    checksum,
    dump_snapshot,
    load_snapshot,
    restore_snapshot,
    write_snapshot,
)
from matcha.distributed.worker_state import WorkerState
from matcha.errors import DataError, InputError, WriteError
from matcha.testing import MemoryNetwork, run_threads

PLAN = Fixed(2)


def worker(steps: int = 0, value: float = 1.0) -> WorkerState:
    """One that has trained for some steps, with momentum to remember."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    gossip = Gossip(model, optimizer, PLAN, transport=MemoryNetwork(1).transport(0))
    for _ in range(steps):
        double_step(model, optimizer, torch.full((2, 4), value))
    return gossip.state


def weights(state: WorkerState) -> torch.Tensor:
    return nn.utils.parameters_to_vector(state.modules.parameters()).detach()


def test_a_worker_takes_over_anothers_state_and_place() -> None:
    old, new = worker(steps=3), worker()
    extra = load_snapshot(dump_snapshot(old, {"epoch": 7}), new)
    assert extra == {"epoch": 7}
    assert new.iteration == 3
    for state in (old, new):  # the momentum came along too
        double_step(state.modules, state.optimizers[0], torch.ones(2, 4))
    assert torch.equal(weights(old), weights(new))


def test_the_average_of_files_is_that_of_their_models(tmp_path: Path) -> None:
    saved = [worker(2, value) for value in (0.5, 1.0, 1.5)]
    paths = [tmp_path / f"{k}.safetensors" for k in range(3)]
    for k, (path, state) in enumerate(zip(paths, saved, strict=True)):
        write_snapshot(path, state, {"first": k == 0}, {})
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
    for metadata in (None, {"matcha": "no JSON"}, {"other": "{}"}):
        save_file({"x": torch.ones(1)}, tmp_path / "foreign", metadata=metadata)
        with pytest.raises(DataError, match=r"foreign was not written by Gossip.save\(\)"):
            restore_snapshot(tmp_path / "foreign", worker(), {})
    strange = worker(1)
    strange.optimizers[0].param_groups[0]["when"] = object()
    with pytest.raises(InputError, match=r"'optimizer/param_groups/0/when' is a object"):
        dump_snapshot(strange, {})


def test_extra_keeps_types_of_keys_and_tensors(tmp_path: Path) -> None:
    """JSON turned the keys of `MultiStepLR` into text, and refused tensors without a name."""
    kept: dict[Any, Any] = {
        "schedule": {"milestones": Counter({3: 1, 5: 1}), "factor": 0.1},
        "indices": torch.arange(5),
        "a/b": torch.ones(2),
        "a": {"b": torch.zeros(2)},
        7: (None, True, [1.5, "x"], math.inf),
    }

    def work(transport: Any) -> dict[str, Any]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Gossip(model, optimizer, PLAN, transport=transport, timeout=30) as gossip:
            gossip.save(tmp_path, extra=kept)
            with pytest.raises(WriteError, match=r"'extra/schedule/when' is a object: checkpoints"):
                gossip.save(tmp_path, extra={"schedule": {"when": object()}})
            with pytest.raises(WriteError, match=r"'extra/of' has the key \(1, 2\), a tuple"):
                gossip.save(tmp_path, extra={"of": {(1, 2): 3}})
            return gossip.load(tmp_path)

    for found in run_threads(2, work):
        assert torch.equal(found.pop("indices"), torch.arange(5))
        assert torch.equal(found.pop("a/b"), torch.ones(2))
        assert torch.equal(found.pop("a")["b"], torch.zeros(2))
        assert found == {name: kept[name] for name in ("schedule", 7)}
        assert isinstance(found["schedule"]["milestones"], Counter)


def test_a_schedule_goes_on_where_it_was(tmp_path: Path) -> None:
    def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 4])

    def work(transport: Any) -> list[float]:
        rates = []
        for resumes in (False, True):
            model = nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            schedule = schedule_of(optimizer)
            with Gossip(model, optimizer, PLAN, transport=transport, timeout=30) as gossip:
                if resumes:
                    schedule.load_state_dict(gossip.load(tmp_path)["schedule"])
                for step in range(3):
                    optimizer.step()
                    schedule.step()
                    if step == 0 and not resumes:
                        gossip.save(tmp_path, extra={"schedule": schedule.state_dict()})
                rates.append(float(schedule.get_last_lr()[0]))
        return rates

    for first, resumed in run_threads(2, work):
        assert first == pytest.approx(0.1)
        assert resumed == pytest.approx(0.01)
