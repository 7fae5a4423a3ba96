from __future__ import annotations

import pytest
import torch
from torch import nn

from matcha.simulation.flat import Layout, Workers, mean_squared_deviation
from matcha.zoo.models import LanguageModel, build

CPU = torch.device("cpu")


def make(module, channels_last=False, **choices):
    return Workers(
        module, 3, device=CPU, dtype=torch.float32, channels_last=channels_last, **choices
    )


@pytest.mark.parametrize("channels_last", [False, True])
def test_views_share_memory_and_round_trip(channels_last):
    shapes = {"a": torch.Size([4, 3, 2, 5]), "b": torch.Size([7]), "c": torch.Size([])}
    layout = Layout(shapes, channels_last=channels_last)
    values = {name: torch.randn(shape) for name, shape in shapes.items()}
    row = torch.zeros(layout.size)
    for name, view in layout.views(row):
        assert view.shape == shapes[name]
        view.copy_(values[name])
    for name, span in layout.spans(row):
        assert torch.equal(span, layout.ravel(values[name]))
    matrix = row.repeat(2, 1)
    for name, view in layout.views(matrix):
        assert torch.equal(view[1], values[name])
    if channels_last:
        kernel = dict(layout.views(row))["a"]
        assert kernel.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("channels_last", [False, True])
def test_modules_read_their_rows(channels_last):
    template = build("resnet8", 10)
    workers = make(template, channels_last)
    x = torch.randn(2, 3, 32, 32)
    expected = template.train()(x)
    torch.testing.assert_close(workers.modules[1](x), expected, rtol=1e-4, atol=1e-5)
    workers.parameters[1].zero_()
    assert not workers.modules[1](x).any()
    assert workers.modules[2](x).any()


def test_gradients_land_in_their_row():
    template = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(3 * 36, 2)).eval()
    workers = make(template, channels_last=True)
    x = torch.randn(4, 2, 8, 8)
    grads = torch.autograd.grad(workers.modules[1](x).square().sum(), workers.leaves[1])
    workers.store_gradients(1, grads)
    expected = torch.autograd.grad(template(x).square().sum(), list(template.parameters()))
    for (_, view), value in zip(workers.layout.views(workers.updates[1]), expected, strict=True):
        torch.testing.assert_close(view, value, rtol=1e-4, atol=1e-4)
    assert not workers.updates[0].any()


def test_tied_weights_stay_tied_and_the_template_is_left_alone():
    template = LanguageModel(20, 8)
    before = template.embedding.weight.detach().clone()
    workers = make(template)
    assert workers.num_parameters == sum(p.numel() for p in template.parameters())
    for module in workers.modules:
        assert module.decoder.weight is module.embedding.weight
    workers.parameters.fill_(1.0)
    assert torch.equal(template.embedding.weight, before)
    average = workers.average()
    assert average.decoder.weight is average.embedding.weight
    assert torch.equal(average.embedding.weight, torch.ones(20, 8))


def test_low_precision_copy_serves_matrices_only():
    workers = make(build("resnet8", 10), compute_dtype=torch.bfloat16)
    kinds = {leaf.dim() > 1: leaf.dtype for leaf in workers.leaves[0]}
    assert kinds == {True: torch.bfloat16, False: torch.float32}
    workers.parameters.mul_(2.0)
    stale = workers.leaves[0][0].detach().clone()
    workers.refresh()
    torch.testing.assert_close(workers.leaves[0][0].detach(), stale * 2)


def test_average_takes_means_of_parameters_and_buffers():
    workers = make(nn.BatchNorm1d(2))
    workers.parameters.copy_(torch.arange(3.0)[:, None].expand_as(workers.parameters))
    workers.buffers.copy_(torch.arange(3.0)[:, None].expand_as(workers.buffers) * 2)
    average = workers.average()
    assert average.weight.tolist() == [1.0, 1.0]
    assert average.running_mean.tolist() == [2.0, 2.0]
    assert not average.training


def test_the_average_is_by_push_sums_weights_where_there_are_any():
    workers = make(nn.BatchNorm1d(2))
    workers.parameters.copy_(torch.arange(3.0)[:, None].expand_as(workers.parameters))
    workers.shares = torch.tensor([[0.5], [0.5], [2.0]], dtype=torch.float64)
    assert workers.average().weight.tolist() == [1.5, 1.5]
    size = workers.parameters.shape[1]
    assert workers.consensus_distance() == pytest.approx(size * (1.5**2 + 0.5**2 + 0.5**2) / 3)


def test_consensus_distance_is_the_definition():
    x = torch.randn(5, 9, dtype=torch.float64)
    expected = sum(float((row - x.mean(0)).square().sum()) for row in x) / 5
    assert mean_squared_deviation(x) == pytest.approx(expected, rel=1e-12)
