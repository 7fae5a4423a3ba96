"""A small model that every worker trains over in-memory links, and the same by `Round.mix`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from tests.distributed import cases
from torch import nn

from matcha import Plan, Round, families
from matcha.distributed import Gossip
from matcha.plans.plan import AnyPlan
from matcha.testing import MemoryTransport, run_threads
from matcha.wires import Float

PLAN = cases.make_plan("vanilla", "laplacian")
SEEDING = threading.Lock()  # threads share torch's generator


def train(
    make: Callable[[], nn.Module],
    step: Callable[[nn.Module, torch.optim.Optimizer, torch.Tensor], None] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    plan: Any = PLAN,
    steps: int = 3,
    **options: Any,
) -> list[tuple[nn.Module, Gossip]]:
    """Train on each worker's own batches (4 inputs) and return every worker's model and gossip."""

    def work(transport: MemoryTransport) -> tuple[nn.Module, Gossip]:
        with SEEDING:
            torch.manual_seed(transport.rank)
            model = make()
        chosen = optimizer((p for p in model.parameters() if p.requires_grad), lr=0.1)
        settings = {"transport": transport, "timeout": 30.0, **options}
        gossip = Gossip(model, chosen, plan, **settings)
        generator = torch.Generator().manual_seed(transport.rank)
        for _ in range(steps):
            batch = torch.randn(16, 4, generator=generator)
            (step or plain_step)(model, chosen, batch)
        gossip.detach()
        return model, gossip

    return run_threads(plan.num_workers, work)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def mlp() -> nn.Module:
    # Inside a thread: a generator of our own rather than the global seed.
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return model.double()


def single_worker(
    steps: int, optimizer: Callable[..., torch.optim.Optimizer], plan: Plan = PLAN
) -> list[torch.Tensor]:
    """The same training of `mlp` with one optimizer a worker and `Round.mix` between steps."""
    models = [mlp() for _ in range(plan.num_workers)]
    optimizers = [optimizer(model.parameters(), lr=0.1) for model in models]
    generators = [torch.Generator().manual_seed(rank) for rank in range(plan.num_workers)]
    for k in range(steps):
        for model, chosen, generator in zip(models, optimizers, generators, strict=True):
            plain_step(model, chosen, torch.randn(16, 4, generator=generator).double())
        mixed = plan.round(k).mix(np.stack([flat(model).numpy() for model in models]))
        for model, row in zip(models, mixed, strict=True):
            nn.utils.vector_to_parameters(torch.from_numpy(row), model.parameters())
    return [flat(model) for model in models]


def double_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    plain_step(model, optimizer, batch.double())


@AnyPlan.register
class Fixed:
    """Rounds from a list, then empty ones, as any plan-like value may give them."""

    seed = 0
    digest = "fixed"
    strategy = "fixed"
    budget = 1.0
    wire = Float()
    outer = None
    worker_weights = None
    levels = ()

    def __init__(self, num_workers: int, *matchings_of_rounds: tuple) -> None:
        self.num_workers = num_workers
        self.topology = families.complete(num_workers)
        self._matchings = matchings_of_rounds

    def rounds(self, start: int = 0, stop: int | None = None) -> Iterator[Round]:
        for k in range(start, 10**9 if stop is None else stop):
            chosen = self._matchings[k] if k < len(self._matchings) else ()
            indices = tuple(range(len(chosen)))
            yield Round(matchings=chosen, indices=indices, mixing="pairwise", weight=0.5)
