from __future__ import annotations

import torch
from torch import nn

from matcha.tasks.evaluation import recalibrate


def test_recalibration_measures_the_given_batches():
    model = nn.Sequential(nn.BatchNorm1d(2)).eval()
    batches = [torch.randn(50, 2) * 3 + 1 for _ in range(4)]
    with torch.no_grad():
        recalibrate(model, batches)
    layer = model[0]
    torch.testing.assert_close(
        layer.running_mean, torch.stack([b.mean(0) for b in batches]).mean(0)
    )
    torch.testing.assert_close(layer.running_var, torch.stack([b.var(0) for b in batches]).mean(0))
    assert layer.momentum == 0.1
    assert not layer.training
