from __future__ import annotations

import pytest
import torch
from tests.distributed.hooks.test_steps import ALWAYS, halves
from tests.distributed.perceptrons import Fixed, mlp

from matcha.distributed import Gossip, MemoryNetwork, MemoryTransport, run_threads
from matcha.distributed.hooks.loss_scaling import LossScaling


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


def test_loss_scaling_leaves_no_mark_where_no_scaler_is() -> None:
    """Lightning refuses to clip gradients of optimizers that say they unscale by themselves."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Gossip(model, optimizer, Fixed(2), transport=MemoryNetwork(1).transport(0))
    assert not hasattr(optimizer, "_step_supports_amp_scaling")


def test_a_skipped_step_is_seen_as_skipped_by_everybody() -> None:
    """The optimizer is not called at all, so wrappers that count calls count right."""
    calls: list[int] = []

    def work(transport: MemoryTransport) -> int:
        model = mlp()
        first, second = halves(model)
        first.register_step_post_hook(lambda *_: calls.append(transport.rank))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        with Gossip(
            model, [first, second], ALWAYS, transport=transport, deadline=30, overlap=True
        ) as gossip:
            for k in range(4):
                model.zero_grad()
                scaler.scale(model(torch.ones(2, 4).double()).square().mean()).backward()
                if transport.rank == 1 and k % 2:
                    model[0].weight.grad[0, 0] = torch.inf
                scaler.step(first)
                scaler.step(second)
                scaler.update()
            return gossip.iteration

    assert run_threads(2, work) == [4, 4]
    assert sorted(calls) == [0, 0, 0, 0, 1, 1]
