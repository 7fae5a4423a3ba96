"""Built-in tasks on real workers: a recipe's task, optimizer and rates, handed to the runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from matcha.distributed.training import Training, train_task
from matcha.distributed.transports.slow_links import SlowLinks
from matcha.distributed.transports.transport import Transport
from matcha.plans import AnyPlan
from matcha.records import Record
from matcha.tasks.optimizers import SGD, Adam, Optimizer
from matcha.tasks.recipes import Choices, recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTraining:
    """How a built-in task is trained on real workers; None takes the recipe's value."""

    task: str
    choices: Choices
    epochs: int | None = None
    learning_rate: float | None = None
    overlap: bool = False
    wire_dtype: torch.dtype | None = None
    deadline: float = 300.0
    link_mbps: float | None = None
    """Slow every link down to this speed, by emulation."""
    target_loss: float | None = None
    evaluate_every: int = 1
    directory: Path | None = None
    name: str = "training"
    resume: bool = False
    checkpoint_every: int = 0
    tensorboard: bool = False


def run_worker(
    request: TaskTraining,
    plan: AnyPlan,
    transport: Transport,
    on_record: Callable[[Record], None] | None = None,
) -> list[Record]:
    """Train one worker's part of a built-in task; see `matcha.distributed.train_task`."""
    chosen = recipe(request.task)
    epochs = chosen.epochs if request.epochs is None else request.epochs
    if request.link_mbps is not None:
        transport = SlowLinks(transport, request.link_mbps)
    training = Training(
        epochs=epochs,
        rate=chosen.schedule(epochs, request.learning_rate).rate,
        optimizer=torch_optimizer(chosen.optimizer),
        clip_norm=getattr(chosen.optimizer, "clip_norm", None),
        evaluate_every=request.evaluate_every,
        target_loss=request.target_loss,
        directory=request.directory,
        name=request.name,
        config=describe(request, epochs),
        resume=request.resume,
        checkpoint_every=request.checkpoint_every,
        tensorboard=request.tensorboard,
        gossip={
            "overlap": request.overlap,
            "wire_dtype": request.wire_dtype,
            "deadline": request.deadline,
        },
    )
    return train_task(chosen.task(request.choices), plan, training, transport, on_record)


def describe(request: TaskTraining, epochs: int) -> dict[str, Any]:
    """What the run's header says, in values JSON can hold."""
    chosen = recipe(request.task)
    described: dict[str, Any] = {
        "task": request.task,
        "model": request.choices.model or chosen.model,
        "batch_size": chosen.examples_a_batch(request.choices),
        "partition": request.choices.partition,
        "epochs": epochs,
        "learning_rate": request.learning_rate or chosen.learning_rate,
        "update_rule": "footnote" if request.overlap else "eq2",
        "wire_dtype": str(request.wire_dtype or "as the model"),
    }
    if request.target_loss is not None:
        described["target_loss"] = request.target_loss
    if request.link_mbps is not None:
        described["link_mbps"] = f"{request.link_mbps:g} (emulated)"
    return described


def torch_optimizer(
    optimizer: Optimizer,
) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """PyTorch's optimizer with a recipe's settings; the rate is set at each step."""

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if isinstance(optimizer, Adam):
            betas = (optimizer.beta1, optimizer.beta2)
            return torch.optim.Adam(
                parameters,
                betas=betas,
                eps=optimizer.epsilon,
                weight_decay=optimizer.weight_decay,
            )
        assert isinstance(optimizer, SGD)
        return torch.optim.SGD(
            parameters,
            momentum=optimizer.momentum,
            nesterov=optimizer.nesterov,
            weight_decay=optimizer.weight_decay,
        )

    return make
