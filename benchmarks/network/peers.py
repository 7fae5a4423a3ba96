"""What people train with today, and ours, behind one small face: forward, step, close.

DDP with its hooks and PostLocalSGD come with torch; Decent-DP is `pip install decent-dp loguru`.
torch refuses its bf16 hook on gloo ("required CUDA 11+ and NCCL 2.10+"): the fp16 hook, of the same
bytes, stands for both.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from matcha import Plan
from matcha.distributed import Gossip, Transport

RATE, MOMENTUM = 0.05, 0.9
# With the default of 25 MB the fp16 hook hung on gloo: several collectives at once.
BUCKET_MB = 100
POWER_RANK, POWER_START = 2, 10


class Method(Protocol):
    """One worker's way to train a model."""

    def forward(self, inputs: Tensor) -> Tensor:
        """The model's answer."""

    def step(self, loss: Tensor) -> None:
        """Gradient, update and whatever is exchanged."""

    def settle(self) -> None:
        """Wait for what is still on its way."""

    def close(self) -> None:
        """Leave nothing behind."""


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of every method."""
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)


class Plain:
    """A model, an optimizer, and whatever is hooked to them."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer

    def forward(self, inputs: Tensor) -> Tensor:
        """The model's answer."""
        answer: Tensor = self.model(inputs)
        return answer

    def step(self, loss: Tensor) -> None:
        """Gradient and update; wrappers and hooks exchange on the way."""
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def settle(self) -> None:
        """Nothing is ever on its way."""

    def close(self) -> None:
        """Nothing is left behind."""


class Ours(Plain):
    """Gossip by a plan."""

    def __init__(self, model: nn.Module, plan: Plan, transport: Transport, **options: Any) -> None:
        super().__init__(model, sgd(model))
        self.gossip = Gossip(
            model, self.optimizer, plan, transport=transport, timeout=120, **options
        )

    def settle(self) -> None:
        """Wait for an exchange beside the gradient."""
        self.gossip.state.settle()

    def close(self) -> None:
        """Take the hooks off."""
        self.gossip.detach()


class Decent:
    """Decent-DP on a ring: it owns the optimizer and steps in its backward hooks."""

    def __init__(self, model: nn.Module) -> None:
        from decent_dp.ddp import DecentralizedDataParallel

        self.wrapped = DecentralizedDataParallel(
            model,
            lambda named: torch.optim.SGD([p for _, p in named], lr=RATE, momentum=MOMENTUM),
            topology="ring",
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """The model's answer."""
        answer: Tensor = self.wrapped(inputs)
        return answer

    def step(self, loss: Tensor) -> None:
        """Gradient; update and exchange happen in its hooks."""
        self.wrapped.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]

    def settle(self) -> None:
        """The average of all models is the same before and after its exchange."""

    def close(self) -> None:
        """Wait for the last exchange, which the next backward pass would wait for."""
        for work in self.wrapped._comm_ops:
            if work is not None:
                work.wait()


def _ddp(model: nn.Module, hook: str | None = None) -> Method:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    wrapped = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    if hook == "fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=POWER_RANK,
            start_powerSGD_iter=POWER_START,
        )
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return Plain(wrapped, sgd(model))


def _local(model: nn.Module, period: int) -> Method:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    averager = PeriodicModelAverager(period=period, warmup_steps=0)
    return Plain(model, PostLocalSGDOptimizer(sgd(model), averager))


PEERS: dict[str, Callable[[nn.Module], Method]] = {
    "silent": lambda model: Plain(model, sgd(model)),
    "DDP": _ddp,
    "DDP, fp16 hook": lambda model: _ddp(model, "fp16"),
    "DDP, PowerSGD hook": lambda model: _ddp(model, "powersgd"),
    "PostLocalSGD 10": lambda model: _local(model, 10),
    "PostLocalSGD 50": lambda model: _local(model, 50),
    "Decent-DP ring": Decent,
}


def available() -> list[str]:
    """The peers that are installed here."""
    has_decent = importlib.util.find_spec("decent_dp") is not None
    return [name for name in PEERS if name != "Decent-DP ring" or has_decent]


def attach(case: dict[str, Any], model: nn.Module, transport: Transport) -> Method:
    """The method of a case."""
    if case["plan"] is None:
        return PEERS[case["name"]](model)
    return Ours(model, Plan.load(Path(case["plan"])), transport, overlap=case["overlap"])
