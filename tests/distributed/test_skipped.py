"""Steps that an optimizer leaves out: momentum rules and exchanges go on as if nothing was seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.distributed.perceptrons import Fixed, flat, mlp
from tests.distributed.test_optimizer_hooks import ALWAYS, backward, batch, halves
from torch import nn

from matcha.distributed import Gossip
from matcha.errors import InputError
from matcha.testing import MemoryNetwork, MemoryTransport, run_threads
from matcha.training.momentum import MOMENTA

RULES = [name for name in MOMENTA if name != "auto"]


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, **options)


def train(
    transport: MemoryTransport,
    momentum: str,
    *,
    fused: bool = False,
    overlap: bool = False,
    overflows: Any = lambda rank, k: False,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Six scaled steps; the gradients of steps that overflow are infinite."""
    model = mlp().float()
    optimizer = sgd(model, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    options: dict[str, Any] = {"transport": transport, "timeout": 30, "overlap": overlap}
    with Gossip(model, optimizer, ALWAYS, scaler=scaler, momentum=momentum, **options) as gossip:
        generator = torch.Generator().manual_seed(transport.rank)
        for k in range(6):
            optimizer.zero_grad()
            inputs = batch(generator).float()
            scaler.scale(model(inputs).square().mean()).backward()
            if overflows(transport.rank, k):
                model[0].weight.grad[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
        assert gossip.iteration == 6
        return flat(model), {k: v.clone() for k, v in gossip.state.momentum.state().items()}


CASES = [(rule, fused, False) for rule in RULES for fused in (False, True)]


@pytest.mark.parametrize(("momentum", "fused", "overlap"), [*CASES, ("local", False, True)])
def test_an_overflow_on_one_worker_leaves_all_finite(momentum, fused, overlap) -> None:
    def work(transport: MemoryTransport) -> Any:
        # PyTorch's fused SGD leaves its momentum uninitialised where the first step overflows.
        steps = (1, 3) if fused else (0, 3)
        overflow = lambda rank, k: rank == 1 and k in steps  # noqa: E731
        return train(transport, momentum, fused=fused, overlap=overlap, overflows=overflow)

    for parameters, state in run_threads(2, work):
        assert torch.isfinite(parameters).all()
        assert all(torch.isfinite(value).all() for value in state.values())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("momentum", RULES)
def test_a_scale_changes_nothing(momentum, fused) -> None:
    """A fused optimizer gets gradients that are still scaled; the rules must not."""

    def unscaled(transport: MemoryTransport) -> torch.Tensor:
        model = mlp().float()
        optimizer = sgd(model, fused=fused)
        with Gossip(model, optimizer, ALWAYS, transport=transport, timeout=30, momentum=momentum):
            generator = torch.Generator().manual_seed(transport.rank)
            for _ in range(6):
                optimizer.zero_grad()
                model(batch(generator).float()).square().mean().backward()
                optimizer.step()
        return flat(model)

    scaled = run_threads(2, lambda transport: train(transport, momentum, fused=fused)[0])
    for found, expected in zip(scaled, run_threads(2, unscaled), strict=True):
        assert torch.allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("momentum", RULES)
def test_a_skipped_bad_batch_leaves_the_rules_alone(momentum) -> None:
    def work(transport: MemoryTransport) -> torch.Tensor:
        model = mlp()
        optimizer = sgd(model)
        options: dict[str, Any] = {"transport": transport, "timeout": 30, "momentum": momentum}
        with Gossip(model, optimizer, ALWAYS, **options) as gossip:
            generator = torch.Generator().manual_seed(transport.rank)
            for k in range(6):
                backward(model, batch(generator))
                if transport.rank == 0 and k == 2:
                    model[0].weight.grad.fill_(torch.nan)
                    gossip.step()
                else:
                    optimizer.step()
            assert all(
                torch.isfinite(value).all() for value in gossip.state.momentum.state().values()
            )
        return flat(model)

    assert all(torch.isfinite(parameters).all() for parameters in run_threads(2, work))


def test_a_step_skipped_after_a_silent_round_shares_the_moment_of_that_round() -> None:
    meets, silent = (((0, 1),),), ()
    plan = Fixed(2, meets, silent, *[meets] * 37)

    def work(transport: MemoryTransport) -> list[torch.Tensor]:
        model = mlp()
        optimizer = sgd(model)

        def moments() -> torch.Tensor:
            found = [optimizer.state[p]["momentum_buffer"].flatten() for p in model.parameters()]
            return torch.cat(found).clone()

        options: dict[str, Any] = {"transport": transport, "timeout": 30, "momentum": "shared"}
        with Gossip(model, optimizer, plan, **options) as gossip:
            generator = torch.Generator().manual_seed(transport.rank)
            for _ in range(2):
                backward(model, batch(generator))
                optimizer.step()
            backward(model, batch(generator))
            before = moments()
            if transport.rank == 0:
                gossip.step()
            else:
                before = 0.9 * before + torch.cat([p.grad.flatten() for p in model.parameters()])
                optimizer.step()
            return [before, moments()]

    (first, after), (second, other) = run_threads(2, work)
    torch.testing.assert_close(after, (first + second) / 2)
    torch.testing.assert_close(other, after)


def test_a_skipped_step_is_seen_as_skipped_by_everybody() -> None:
    """The optimizer is not called at all, so wrappers that count calls count right."""
    calls: list[int] = []

    def work(transport: MemoryTransport) -> int:
        model = mlp()
        first, second = halves(model)
        first.register_step_post_hook(lambda *_: calls.append(transport.rank))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        options: dict[str, Any] = {"transport": transport, "timeout": 30, "overlap": True}
        with Gossip(model, [first, second], ALWAYS, scaler=scaler, **options) as gossip:
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


def alone() -> MemoryTransport:
    return MemoryNetwork(1).transport(0)


def scaled_step(scaler: Any, model: nn.Module, optimizer: Any, gradient: float = 1.0) -> None:
    scaler.scale(torch.zeros(()))  # as the loss would
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    scaler.step(optimizer)
    scaler.update()


def test_a_scaler_that_gossip_does_not_know_is_refused() -> None:
    model, scaler = mlp(), torch.amp.GradScaler("cpu", init_scale=1.0)
    optimizer = sgd(model)
    Gossip(model, optimizer, Fixed(2), transport=alone())
    with pytest.raises(InputError, match=r"Gossip\(\.\.\., scaler=scaler\)"):
        scaled_step(scaler, model, optimizer)


def test_a_disabled_scaler_need_not_be_known() -> None:
    model, scaler = mlp(), torch.amp.GradScaler("cpu", enabled=False)
    optimizer = sgd(model)
    gossip = Gossip(model, optimizer, Fixed(2), transport=alone())
    scaled_step(scaler, model, optimizer)
    assert gossip.iteration == 1


def test_scalers_of_others_are_left_alone_and_detach_restores_ones_own() -> None:
    model, scaler = mlp(), torch.amp.GradScaler("cpu", init_scale=1.0)
    optimizer, step = sgd(model), torch.amp.GradScaler.step
    gossip = Gossip(model, optimizer, Fixed(2), transport=alone(), scaler=scaler)
    assert torch.amp.GradScaler.step is step
    scaled_step(scaler, model, optimizer, torch.inf)
    assert gossip.iteration == 1
    gossip.detach()
    assert "step" not in vars(scaler)
    scaled_step(scaler, model, optimizer, torch.inf)
    assert gossip.iteration == 1


def test_two_models_share_a_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    models = [mlp(), mlp()]
    optimizers = [sgd(model) for model in models]
    first, second = (
        Gossip(model, optimizer, Fixed(2), transport=alone(), scaler=scaler)
        for model, optimizer in zip(models, optimizers, strict=True)
    )
    first.detach()
    for model, optimizer in zip(models, optimizers, strict=True):
        scaled_step(scaler, model, optimizer, torch.inf)
    assert (first.iteration, second.iteration) == (0, 1)
    second.detach()


def test_a_scaler_leaves_no_mark_on_an_optimizer() -> None:
    """Lightning refuses to clip gradients of optimizers that say they unscale by themselves."""
    model = mlp()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu")
    Gossip(model, optimizer, Fixed(2), transport=alone(), scaler=scaler)
    assert not hasattr(optimizer, "_step_supports_amp_scaling")
