from __future__ import annotations

import pytest
import torch
from torch import nn

from matcha.errors import InputError
from matcha.zoo.models import MODELS, LanguageModel, WideResNet, build, resnet
from matcha.zoo.models.language import LSTMLayer


@pytest.mark.parametrize(
    ("name", "classes", "parameters"),
    [
        ("cnn", 10, 6_170),
        ("resnet20", 10, 272_474),
        ("resnet20-wide", 10, 4_327_754),
        ("resnet50", 10, 776_794),
        ("resnet18", 10, 11_173_962),
        ("wideresnet28-10", 100, 36_536_884),
        ("vgg11", 10, 9_750_922),
        ("vgg16", 10, 14_724_042),
    ],
)
def test_sizes_are_the_published_ones(name, classes, parameters):
    assert sum(p.numel() for p in build(name, classes).parameters()) == parameters


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"wideresnet28-10", "vgg16", "resnet18"}))
def test_scores_for_every_class(name):
    shape = (2, 1, 8, 8) if name.startswith(("cnn", "perceptron")) else (2, 3, 32, 32)
    assert build(name, 7)(torch.randn(shape)).shape == (2, 7)


def test_the_papers_resnet50_is_three_stages_of_eight_bottlenecks():
    model = resnet(50, 10)
    assert [type(block).__name__ for block in model.blocks] == ["Bottleneck"] * 24
    widths = [block.conv2.out_channels for block in model.blocks]
    assert widths == [16] * 8 + [32] * 8 + [64] * 8


def test_weights_come_from_the_seed_and_nothing_else():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = build("cnn", 10, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    again, other = build("cnn", 10, seed=3), build("cnn", 10, seed=4)
    assert torch.equal(first.head.weight, again.head.weight)
    assert not torch.equal(first.head.weight, other.head.weight)


def test_unknown_names_and_depths():
    with pytest.raises(InputError, match="did you mean 'resnet50'"):
        build("resnet52", 10)
    with pytest.raises(InputError, match="6n \\+ 2"):
        resnet(21, 10)
    with pytest.raises(InputError, match="6n \\+ 4"):
        WideResNet(20, 2, 10)


def test_lstm_layer_is_torchs():
    ours, theirs = LSTMLayer(7).double(), nn.LSTM(7, 7).double()
    with torch.no_grad():
        theirs.weight_ih_l0.copy_(ours.weight_inputs)
        theirs.weight_hh_l0.copy_(ours.weight_hidden)
        theirs.bias_ih_l0.copy_(ours.bias)
        theirs.bias_hh_l0.zero_()
    x = torch.randn(5, 3, 7, dtype=torch.float64, requires_grad=True)
    hidden, cell = torch.randn(2, 3, 7, dtype=torch.float64)
    out, last = ours(x, hidden, cell)
    expected, (_, expected_cell) = theirs(x, (hidden[None], cell[None]))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(last, expected_cell[0])
    weights = torch.randn_like(out)
    mine = torch.autograd.grad(
        (out * weights).sum(), [x, ours.weight_inputs, ours.weight_hidden, ours.bias]
    )
    other = torch.autograd.grad(
        (expected * weights).sum(),
        [x, theirs.weight_ih_l0, theirs.weight_hh_l0, theirs.bias_ih_l0],
    )
    for a, b in zip(mine, other, strict=True):
        torch.testing.assert_close(a, b)


def test_language_model_ties_its_embedding():
    model = LanguageModel(30, 8)
    assert model.decoder.weight is model.embedding.weight
    scores, state = model(torch.randint(0, 30, (6, 4)), *model.state(4))
    assert scores.shape == (6, 4, 30)
    assert [tensor.shape for tensor in state] == [(4, 8)] * 4
    paper = LanguageModel()
    assert (
        sum(p.numel() for p in paper.parameters()) == 10_000 * 1501 + 2 * (2 * 1500**2 + 1500) * 4
    )
