from __future__ import annotations

import pytest
import torch
from torch import nn

from matcha.distributed.exchange.buckets import fill_buckets, layout_digest
from matcha.errors import InputError


def fill(model: nn.Module, size: int = 10**6, buffers: bool = False):
    return fill_buckets(model, bucket_bytes=size, buffers=buffers)


def test_parameters_keep_identity_values_and_strides() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(4, 2))
    model = model.to(memory_format=torch.channels_last)
    before = {n: (id(p), p.detach().clone(), p.stride()) for n, p in model.named_parameters()}
    (bucket,) = fill(model)
    for name, parameter in model.named_parameters():
        identity, value, stride = before[name]
        assert id(parameter) == identity
        assert torch.equal(parameter, value)
        assert parameter.stride() == stride
        assert parameter.data_ptr() % 64 == bucket.data.data_ptr() % 64
    bucket.data.zero_()
    assert all(not p.any() for p in model.parameters())


def test_buckets_part_by_dtype_and_size() -> None:
    model = nn.ParameterList(
        [torch.ones(100), torch.ones(100), torch.ones(5000), torch.ones(100, dtype=torch.float64)]
    )
    buckets = fill(model, size=1000)
    found = [(b.data.dtype, [s.tensor.numel() for s in b.slots]) for b in buckets]
    assert found == [
        (torch.float32, [100, 100]),
        (torch.float32, [5000]),
        (torch.float64, [100]),
    ]


def test_tied_parameters_share_one_place() -> None:
    embedding, decoder = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
    decoder.weight = embedding.weight
    (bucket,) = fill(nn.Sequential(embedding, decoder))
    assert bucket.data.numel() == 48  # 40, aligned
    # Two parameters over one storage are tied as well, though their objects differ.
    twin = nn.Linear(4, 10, bias=False)
    twin.weight = nn.Parameter(embedding.weight.detach())
    (bucket,) = fill(nn.Sequential(embedding, twin))
    assert bucket.data.numel() == 48
    bucket.data.fill_(3)
    assert torch.equal(embedding.weight, twin.weight)


def test_frozen_parameters_and_buffers_stay_out_unless_asked_for() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].weight.requires_grad_(False)
    names = [slot.name for bucket in fill(model) for slot in bucket.slots]
    assert names == ["0.bias", "1.weight", "1.bias"]
    buckets = fill(nn.BatchNorm1d(2), buffers=True)
    assert [(slot.name, b.volatile) for b in buckets for slot in b.slots] == [
        ("weight", False),
        ("bias", False),
        ("running_mean", True),
        ("running_var", True),
    ]


def test_a_moved_parameter_is_noticed_and_taken_back() -> None:
    model = nn.Linear(2, 2)
    (bucket,) = fill(model)
    assert not list(bucket.moved())
    model.bias.data = torch.full((2,), 5.0)
    assert [slot.name for slot in bucket.moved()] == ["bias"]
    assert bucket.take_back() is None
    assert not list(bucket.moved())
    assert bucket.data.eq(5).sum() == 2
    model.double()
    assert bucket.take_back() == "weight"


def test_a_changed_memory_format_moves_no_weight_to_another_place() -> None:
    """`model.to(memory_format=torch.channels_last)` on one worker permuted its messages."""
    model = nn.Conv2d(3, 8, 3)
    (bucket,) = fill(model)
    before = bucket.data.clone()
    model.to(memory_format=torch.channels_last)
    assert [slot.name for slot in bucket.moved()] == ["weight"]
    assert bucket.take_back() is None
    assert torch.equal(bucket.data, before)
    assert torch.equal(model.weight.flatten(), before[: model.weight.numel()])


def test_a_parameter_keeps_its_bucket_alive() -> None:
    model = nn.Linear(3, 3)
    before = model.weight.detach().clone()
    fill(model)  # nobody keeps the buckets
    filler = [torch.full((16,), 7.0) for _ in range(100)]
    assert torch.equal(model.weight, before)
    assert len(filler) == 100


def test_the_digest_tells_layouts_apart() -> None:
    digests = {layout_digest(fill(nn.Linear(a, b))) for a, b in ((2, 3), (3, 2), (2, 4))}
    assert len(digests) == 3
    assert layout_digest(fill(nn.Linear(2, 3))) in digests


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (nn.ReLU(), "no trainable parameters"),
        (nn.LazyLinear(3), "no shape yet"),
        (nn.Linear(2, 2, device="meta"), "holds no dense values"),
    ],
)
def test_what_cannot_be_flattened_is_refused(model, sentence) -> None:
    with pytest.raises(InputError, match=sentence):
        fill(model)
