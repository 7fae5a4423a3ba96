from __future__ import annotations

import pytest
import torch

from matcha.distributed.loss_scaling import LossScaling


@pytest.fixture
def scaler():
    return torch.amp.GradScaler("cpu", init_scale=1.0)


def scaled_step(scaler, optimizer, gradient):
    (parameter,) = optimizer.param_groups[0]["params"]
    scaler.scale(torch.zeros(()))  # as the loss would
    parameter.grad = torch.tensor([gradient])
    scaler.step(optimizer)
    scaler.update()


def watched():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    skips = []
    scaling = LossScaling(optimizer, lambda: skips.append(1))
    optimizer.register_step_pre_hook(lambda *_: setattr(scaling, "stepped", True))
    return optimizer, scaling, skips


def test_only_a_step_that_was_left_out_is_told(scaler):
    optimizer, _, skips = watched()
    scaled_step(scaler, optimizer, 1.0)
    assert skips == []
    scaled_step(scaler, optimizer, float("inf"))
    assert skips == [1]


def test_after_detach_nothing_is_told(scaler):
    optimizer, scaling, skips = watched()
    scaling.detach()
    scaled_step(scaler, optimizer, float("nan"))
    assert skips == []


def test_scalers_are_wrapped_once():
    watched()
    step = torch.amp.GradScaler.step
    watched()
    assert torch.amp.GradScaler.step is step
