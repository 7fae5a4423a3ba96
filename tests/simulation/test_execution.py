"""How an iteration is carried out: what is batched, called, bound and left as it was."""

from __future__ import annotations

import pytest
import torch
from tests.datasets import random_images
from torch import nn

from matcha.rounds import Round
from matcha.simulation import Engine, Execution
from matcha.simulation.execution import (
    Bound,
    Graphs,
    choosing_algorithms,
    prefers_vmap,
)
from matcha.zoo.data import partition
from matcha.zoo.images import ImageTask
from matcha.zoo.models import build
from matcha.zoo.models.vision import BasicBlock


@pytest.mark.parametrize(
    ("layer", "batched"),
    [
        (nn.Linear(2, 2), True),
        (nn.LayerNorm(2), True),
        (nn.Conv1d(1, 1, 1), False),
        (nn.LSTM(2, 2), False),
        (nn.BatchNorm1d(2), False),
        (nn.Dropout(), False),
    ],
)
def test_models_are_batched_where_that_is_quicker_and_possible(layer, batched):
    assert prefers_vmap(nn.Sequential(nn.Linear(2, 2), nn.Sequential(layer))) is batched


def test_a_bound_module_answers_with_the_parameters_of_each_worker():
    layer = nn.Linear(2, 1, bias=False)
    before = layer.weight.detach().clone()
    weights = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]])
    x = torch.ones(5, 2)
    found = torch.func.vmap(lambda w: Bound(layer, {"weight": w})(x))(weights)
    assert found.squeeze(-1).tolist() == [[3.0] * 5, [7.0] * 5]
    assert torch.equal(layer.weight, before)
    # It owns none of them: an optimizer that is given it must find nothing.
    assert list(Bound(layer, {"weight": weights[0]}).parameters()) == []


def test_without_a_gpu_parts_are_called_each_time():
    graphs = Graphs(torch.device("cpu"), capture=True)
    called = []
    assert not graphs.missing(["forward"])
    for _ in range(2):
        graphs.run("forward", lambda: called.append("forward"))
    assert called == ["forward"] * 2


def test_cudnn_is_left_as_it_was():
    before = torch.backends.cudnn.benchmark
    for wanted in (True, False):
        torch.backends.cudnn.benchmark = wanted
        with choosing_algorithms():
            assert torch.backends.cudnn.benchmark
        assert torch.backends.cudnn.benchmark == wanted
    torch.backends.cudnn.benchmark = before


def recompile_limit() -> int:
    settings = torch._dynamo.config
    young = hasattr(settings, "recompile_limit")  # from torch 2.7
    return settings.recompile_limit if young else settings.cache_size_limit


def test_every_workers_blocks_are_compiled(monkeypatch):
    compiled = []
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **options: compiled.append((type(self), options))
    )
    data = random_images(24)
    parts = partition(data.train_labels, 2)
    task = ImageTask("small", data, parts, lambda: build("resnet8", 10), batch_size=4)
    limit = recompile_limit()
    engine = Engine(task, execution=Execution(compile=True))
    assert compiled == [(BasicBlock, {"dynamic": False})] * 6
    assert recompile_limit() == limit
    silent = Round(matchings=(), indices=(), mixing="laplacian", weight=0.1)
    # All workers' blocks share code, so many versions of it: while they run, and only then.
    seen, batch = [], task.batch

    def record(rows):
        seen.append(recompile_limit())
        return batch(rows)

    monkeypatch.setattr(task, "batch", record)
    engine.begin_epoch(0, [0.1] * task.steps_per_epoch, [silent] * task.steps_per_epoch)
    engine.step(0)
    assert seen == [64]
    assert recompile_limit() == limit
