"""Whatever steps the parameters: several optimizers, wrapped ones, closures, none at all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.distributed import cases
from tests.distributed.perceptrons import Fixed, flat, mlp, single_worker
from torch import nn

from matcha.distributed import Gossip
from matcha.errors import InputError
from matcha.testing import MemoryTransport, run_threads

PLAN = cases.make_plan("vanilla", "laplacian")
ALWAYS = Fixed(2, *([(((0, 1),),)] * 40))


def batch(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(16, 4, generator=generator).double()


def backward(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss = model(inputs).square().mean()
    loss.backward()
    return loss


def halves(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return [torch.optim.SGD(matrices, lr=0.1), torch.optim.SGD(others, lr=0.1)]


def footnote(steps: int) -> list[torch.Tensor]:
    """x ← Wx − ηg with SGD, as a loop over the definition."""
    models = [mlp() for _ in range(PLAN.num_workers)]
    generators = [torch.Generator().manual_seed(rank) for rank in range(PLAN.num_workers)]
    for k in range(steps):
        x = np.stack([flat(model).numpy() for model in models])
        for model, generator in zip(models, generators, strict=True):
            backward(model, batch(generator))
        g = np.stack(
            [torch.cat([p.grad.flatten() for p in m.parameters()]).numpy() for m in models]
        )
        for model, row in zip(models, PLAN.round(k).mix(x) - 0.1 * g, strict=True):
            nn.utils.vector_to_parameters(torch.from_numpy(row), model.parameters())
    return [flat(model) for model in models]


@pytest.mark.parametrize("overlap", [False, True])
def test_two_optimizers_make_one_iteration(overlap) -> None:
    def work(transport: MemoryTransport) -> torch.Tensor:
        model = mlp()
        optimizers = halves(model)
        options: dict[str, Any] = {"transport": transport, "timeout": 30, "overlap": overlap}
        with Gossip(model, optimizers, PLAN, **options) as gossip:
            generator = torch.Generator().manual_seed(transport.rank)
            for k in range(4):
                backward(model, batch(generator))
                for optimizer in optimizers[:: 1 if k % 2 else -1]:  # in either order
                    optimizer.step()
                assert gossip.iteration == k + 1
        return flat(model)

    expected = footnote(4) if overlap else single_worker(4, torch.optim.SGD)
    for found, reference in zip(run_threads(8, work), expected, strict=True):
        assert torch.allclose(found, reference, rtol=0, atol=1e-10)


def two_by_turns(transport: MemoryTransport, order: str) -> Any:
    """Step the optimizers of a model's halves in this order, each after a gradient of its own."""
    model = mlp()
    optimizers = dict(zip("dg", halves(model), strict=True))
    given = list(optimizers.values())
    with Gossip(model, given, ALWAYS, transport=transport, timeout=30) as gossip:
        generator = torch.Generator().manual_seed(transport.rank)
        for key in order:
            backward(model, batch(generator))
            optimizers[key].step()
        return gossip.iteration, flat(model)


@pytest.mark.parametrize(
    ("order", "rounds"),
    [
        ("dg" * 10, 10),  # a GAN
        ("dddddg" * 3, 15),  # with a critic
        ("d" * 20 + "g" * 20, 38),  # by phases: once there was one round
    ],
)
def test_between_two_rounds_no_parameter_is_stepped_twice(order, rounds) -> None:
    (first, one), (second, other) = run_threads(2, lambda t: two_by_turns(t, order))
    assert first == second == rounds
    assert (one - other).abs().max() < 0.1


def test_by_turns_a_round_comes_before_the_step_that_needs_it() -> None:
    """x ← Wx − ηg, with g taken before the round, where an optimizer steps twice in a row."""
    order = "ddgdd"
    models = [mlp(), mlp()]
    generators = [torch.Generator().manual_seed(rank) for rank in range(2)]

    def mix() -> None:
        mean = (flat(models[0]) + flat(models[1])) / 2
        for model in models:
            nn.utils.vector_to_parameters(mean.clone(), model.parameters())

    stepped: set[str] = set()
    for key in order:
        gradients = []
        for model, generator in zip(models, generators, strict=True):
            backward(model, batch(generator))
            gradients.append([p.grad.clone() for p in model.parameters()])
        if key in stepped:
            mix()
            stepped.clear()
        for model, taken in zip(models, gradients, strict=True):
            for parameter, gradient in zip(model.parameters(), taken, strict=True):
                if parameter.ndim == (2 if key == "d" else 1):
                    parameter.data.add_(gradient, alpha=-0.1)
        stepped.add(key)
        if len(stepped) == 2:
            mix()
            stepped.clear()
    found = run_threads(2, lambda t: two_by_turns(t, order)[1])
    for model, parameters in zip(models, found, strict=True):
        assert torch.allclose(flat(model), parameters, rtol=0, atol=1e-12)


@pytest.mark.parametrize("momentum", ["tracking", "quasi-global"])
def test_momentum_sees_the_gradients_of_the_optimizer_that_steps(momentum) -> None:
    """Those of the other are of another loss, or from an iteration ago."""

    def work(transport: MemoryTransport, by_two: bool) -> torch.Tensor:
        model = mlp()
        options: dict[str, Any] = {"transport": transport, "timeout": 30, "momentum": momentum}
        rest = [p for p in model.parameters() if p.ndim == 1]
        optimizers: list[Any] = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]
        if by_two:
            matrices = [p for p in model.parameters() if p.ndim == 2]
            optimizers = [torch.optim.SGD(p, lr=0.1, momentum=0.9) for p in (matrices, rest)]
        with Gossip(model, optimizers, ALWAYS, **options):
            generator = torch.Generator().manual_seed(transport.rank)
            for _ in range(6):
                backward(model, batch(generator))
                if by_two:
                    own = [p.grad for p in rest]
                    for p in rest:
                        p.grad = torch.full_like(p, 1e6)
                    optimizers[0].step()
                    for p, gradient in zip(rest, own, strict=True):
                        p.grad = gradient
                optimizers[-1].step()
        return flat(model)

    together = run_threads(2, lambda transport: work(transport, False))
    apart = run_threads(2, lambda transport: work(transport, True))
    for one, two in zip(together, apart, strict=True):
        assert torch.allclose(one, two, rtol=0, atol=1e-12)


def test_a_step_inside_averaged_is_refused() -> None:
    def work(transport: MemoryTransport) -> None:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Gossip(model, optimizer, ALWAYS, transport=transport, timeout=30) as gossip:
            with gossip.averaged():
                backward(model, torch.ones(2, 4).double())
                with pytest.raises(InputError, match=r"step inside averaged\(\) would be lost"):
                    optimizer.step()
                with pytest.raises(InputError, match=r"step inside averaged\(\)"):
                    gossip.step()
            optimizer.step()
            assert gossip.iteration == 1

    run_threads(2, work)


# -- wrappers --------------------------------------------------------------------------------------


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation, as its best-known implementation is written."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=lr)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["old_p"] = p.data.clone()
            p.add_(0.01 * p.grad)

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.data = self.state[p]["old_p"]
        self.base_optimizer.step()

    def step(self, closure: Any = None) -> None:
        closure = torch.enable_grad()(closure)
        closure()
        self.first_step()
        closure()
        self.second_step()


def sam_step(model: nn.Module, optimizer: Any, inputs: torch.Tensor, by_hand: bool) -> None:
    if by_hand:
        backward(model, inputs)
        optimizer.first_step()
        backward(model, inputs)
        optimizer.second_step()
    else:
        optimizer.step(lambda: backward(model, inputs))


@pytest.mark.parametrize("by_hand", [False, True])
def test_sam_exchanges_after_its_second_step(by_hand) -> None:
    def work(transport: MemoryTransport) -> torch.Tensor:
        model = mlp()
        optimizer = Sam(model.parameters(), lr=0.1)
        with Gossip(model, optimizer, PLAN, transport=transport, timeout=30) as gossip:
            generator = torch.Generator().manual_seed(transport.rank)
            for _ in range(3):
                sam_step(model, optimizer, batch(generator), by_hand)
            assert gossip.iteration == 3
        return flat(model)

    def expected() -> list[torch.Tensor]:
        models = [mlp() for _ in range(8)]
        optimizers = [Sam(m.parameters(), lr=0.1) for m in models]
        generators = [torch.Generator().manual_seed(rank) for rank in range(8)]
        for k in range(3):
            for model, optimizer, generator in zip(models, optimizers, generators, strict=True):
                sam_step(model, optimizer, batch(generator), by_hand)
            mixed = PLAN.round(k).mix(np.stack([flat(m).numpy() for m in models]))
            for model, row in zip(models, mixed, strict=True):
                nn.utils.vector_to_parameters(torch.from_numpy(row), model.parameters())
        return [flat(model) for model in models]

    for found, reference in zip(run_threads(8, work), expected(), strict=True):
        assert torch.allclose(found, reference, rtol=0, atol=1e-10)


# -- LBFGS, and no optimizer -----------------------------------------------------------------------


def lbfgs_loss() -> float:
    """The worst of eight workers after 5 steps on data of their own."""

    def work(transport: MemoryTransport) -> float:
        generator = torch.Generator().manual_seed(transport.rank)
        inputs = torch.randn(40, 4, generator=generator).double()
        targets = torch.sin(3 * inputs.sum(1))
        model = mlp()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
        with Gossip(model, optimizer, PLAN, transport=transport, timeout=30):

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = (model(inputs)[:, 0] - targets).square().mean()
                loss.backward()
                return loss

            for _ in range(5):
                optimizer.step(closure)
            return float(closure().detach())

    return max(run_threads(8, work))


def test_lbfgs_forgets_its_history_at_meetings(monkeypatch) -> None:
    assert lbfgs_loss() < 1  # 0.5 is the targets' variance
    monkeypatch.setattr(
        "matcha.distributed.optimizer_hooks.OptimizerHooks._restart_curvature", lambda self: None
    )
    assert lbfgs_loss() > 5  # another point's curvature leads astray


def test_updates_written_by_hand_exchange_by_step() -> None:
    def work(transport: MemoryTransport) -> torch.Tensor:
        model = mlp()
        with Gossip(model, None, PLAN, transport=transport, timeout=30) as gossip:
            generator = torch.Generator().manual_seed(transport.rank)
            for _ in range(4):
                backward(model, batch(generator))
                with torch.no_grad():
                    for p in model.parameters():
                        p.add_(p.grad, alpha=-0.1)
                gossip.step()
        return flat(model)

    expected = single_worker(4, torch.optim.SGD)
    for found, reference in zip(run_threads(8, work), expected, strict=True):
        assert torch.allclose(found, reference, rtol=0, atol=1e-10)
