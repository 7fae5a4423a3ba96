"""Whatever steps the parameters: several optimizers, wrapped ones, closures, none at all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.distributed import cases
from tests.distributed.perceptrons import Fixed, flat, mlp, single_worker
from torch import nn

from matcha.distributed import Gossip, MemoryTransport, run_threads

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
        options: dict[str, Any] = {"transport": transport, "deadline": 30, "overlap": overlap}
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


def test_an_optimizer_that_steps_more_often_makes_no_more_rounds() -> None:
    def work(transport: MemoryTransport) -> int:
        model = mlp()
        critic, generator = halves(model)
        with Gossip(model, [critic, generator], ALWAYS, transport=transport, deadline=30) as gossip:
            for _ in range(3):
                for _ in range(5):
                    backward(model, torch.ones(2, 4).double())
                    critic.step()
                generator.step()
            return gossip.iteration

    assert run_threads(2, work) == [3, 3]


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
        with Gossip(model, optimizer, PLAN, transport=transport, deadline=30) as gossip:
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
    """The worst of eight workers after 30 steps on data of their own."""

    def work(transport: MemoryTransport) -> float:
        generator = torch.Generator().manual_seed(transport.rank)
        inputs = torch.randn(40, 4, generator=generator).double()
        targets = torch.sin(3 * inputs.sum(1))
        model = mlp()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
        with Gossip(model, optimizer, PLAN, transport=transport, deadline=30):

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = (model(inputs)[:, 0] - targets).square().mean()
                loss.backward()
                return loss

            for _ in range(30):
                optimizer.step(closure)
            return float(closure().detach())

    return max(run_threads(8, work))


def test_lbfgs_forgets_its_history_at_meetings(monkeypatch) -> None:
    assert lbfgs_loss() < 1  # 0.5 is the targets' variance
    monkeypatch.setattr("matcha.distributed.hooks.steps.Steps.restart_curvature", lambda self: None)
    assert not lbfgs_loss() < 10  # another point's curvature leads astray


def test_updates_written_by_hand_exchange_by_step() -> None:
    def work(transport: MemoryTransport) -> torch.Tensor:
        model = mlp()
        with Gossip(model, None, PLAN, transport=transport, deadline=30) as gossip:
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
