from __future__ import annotations

import pytest
import torch
from tests.simulation.tasks import er8
from torch import nn

from matcha.errors import InputError
from matcha.records import to_frame
from matcha.simulation import SGD, Constant, Settings, Simulation
from matcha.zoo.tensors import TensorTask


def task_of(number=128, **choices):
    x = torch.randn(number, 4, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    return TensorTask(lambda: nn.Linear(4, 2), x, y, num_workers=8, batch_size=8, **choices)


def test_tensors_train_and_become_a_frame():
    settings = Settings(epochs=4, schedule=Constant(base=0.5), optimizer=SGD())
    records = list(Simulation(task_of(), er8("vanilla"), settings, compute_time=0.01))
    assert records[-1].train_loss < records[0].train_loss
    assert records[-1].test_accuracy > 0.7
    frame = pytest.importorskip("pandas") and to_frame(records)
    assert list(frame["epoch"]) == [1, 2, 3, 4]
    assert "gradient_norm" not in frame


def test_too_few_examples_are_refused():
    with pytest.raises(InputError, match="too few"):
        task_of(number=32)
