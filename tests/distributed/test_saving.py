"""What others save of a model that Gossip has taken in: all of it, and nothing else."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from tests.distributed import cases
from torch import nn

from matcha.distributed import Gossip
from matcha.distributed.exchange.buckets import fill_buckets
from matcha.testing import run_threads


class Tied(nn.Module):
    """Several dtypes and layouts, a frozen backbone, a small head, tied weights, statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 64)
        self.images = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(64)
        self.small = nn.Parameter(torch.randn(10, dtype=torch.bfloat16))
        self.waves = nn.Parameter(torch.randn(7, dtype=torch.complex64))
        self.frozen = nn.Parameter(torch.randn(20), requires_grad=False)
        self.decoder = nn.Linear(64, 500)
        self.decoder.weight = self.embedding.weight
        self.head = nn.Linear(64, 3)


@pytest.fixture(params=["cpu", "cuda"])
def device(request) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU, and PyTorch sees none here")
    return request.param


def pair(device: str = "cpu") -> tuple[nn.Module, nn.Module]:
    """A model as its owner made it, and its twin in buckets."""
    plain = Tied().to(device)
    taken = copy.deepcopy(plain)
    fill_buckets(taken, bucket_bytes=10**6, buffers=True)
    return plain, taken


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


def saved_size(value: object) -> int:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return len(buffer.getvalue())


def test_parameters_look_like_ordinary_ones(device: str) -> None:
    _, taken = pair(device)
    storages = {}
    for name, tensor in (*taken.named_parameters(), *taken.named_buffers()):
        assert tensor.storage_offset() == 0
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, name
        assert storages.setdefault(tensor.untyped_storage().data_ptr(), name) == name


def test_torch_save_writes_a_part_and_not_its_bucket(device: str) -> None:
    plain, taken = pair(device)
    assert saved_size(taken.head.state_dict()) == saved_size(plain.head.state_dict())
    assert saved_size(taken.state_dict()) <= 1.01 * saved_size(plain.state_dict())
    assert saved_size(taken) <= 1.01 * saved_size(plain)


def test_safetensors_save_and_load_a_whole_model(device: str, tmp_path: Path) -> None:
    plain, taken = pair(device)
    safetensors.torch.save_model(plain, str(tmp_path / "plain"))
    safetensors.torch.save_model(taken, str(tmp_path / "taken"))
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "taken").read_bytes()
    safetensors.torch.save_file(taken.head.state_dict(), tmp_path / "head")
    other = pair(device)[1]
    safetensors.torch.load_model(other, str(tmp_path / "taken"))
    assert_equal(other.state_dict(), plain.state_dict())


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # torch 2.4's own writer uses it
@pytest.mark.filterwarnings("ignore:You are using `torch.load`")  # as torch 2.4 does itself
def test_distributed_checkpoints_save_and_load_a_whole_model(device: str, tmp_path: Path) -> None:
    plain, taken = pair(device)
    for name, model in (("plain", plain), ("taken", taken)):
        dcp.save(  # type: ignore[attr-defined]
            {"model": model.state_dict()}, checkpoint_id=tmp_path / name
        )
    sizes = [sum(f.stat().st_size for f in (tmp_path / n).iterdir()) for n in ("plain", "taken")]
    assert sizes[1] <= 1.01 * sizes[0]
    other = pair(device)[1]
    state = other.state_dict()
    dcp.load({"model": state}, checkpoint_id=tmp_path / "taken")  # type: ignore[attr-defined]
    other.load_state_dict(state)
    assert_equal(other.state_dict(), plain.state_dict())


@pytest.mark.parametrize("assign", [False, True])
def test_loading_while_training_is_seen_by_the_next_exchange(assign: bool) -> None:
    plan = cases.make_plan("vanilla", "laplacian")

    def work(transport) -> torch.Tensor:
        model = nn.Linear(3, 2).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with Gossip(model, optimizer, plan, transport=transport, timeout=30) as gossip:
            saved = {n: torch.full_like(p, transport.rank) for n, p in model.named_parameters()}
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if assign:
                        parameter.data = saved[name]  # as SAM and some loaders do
                    else:
                        parameter.copy_(saved[name])
            optimizer.step()
            assert not list(gossip.state.buckets[0].moved())
        return model.weight.detach().clone()

    found = torch.stack(run_threads(8, work))[:, 0, 0].numpy()
    expected = plan.round(0).mix(np.arange(8.0)[:, None])[:, 0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
