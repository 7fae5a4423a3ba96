"""Whether workers' data differ, as their first gradients tell, and what momentum `auto` then is.

Gradients at the same parameters differ between batches of one worker, and between workers. Where
all draw from the same data, the means of a worker's gradients differ by what batches do and no
more: the ratio of the two, as in an analysis of variance, is about 1. Measured on digits for eight
workers: 0.9 for equal data, 1.3 for Dirichlet(10), 8 for Dirichlet(1), 60 for Dirichlet(0.1).
"""

from __future__ import annotations

import logging
from itertools import islice

import torch
from torch import Tensor

from matcha.training.momentum import Momentum, parse_momentum
from matcha.training.optimizers import SGD
from matcha.training.settings import Execution, Settings
from matcha.training.task import Task, first_batches

_FIRST = 8  # gradients of each worker that are looked at
_SAMPLED = 1 << 14  # of a gradient's values: their spread is known to a percent
_DIFFERENT = 3.0  # the ratio from which data differ
_log = logging.getLogger("matcha")


def correction(settings: Settings) -> Momentum | None:
    """What `auto` is, as measured, where data differ; None: the same as where they do not."""
    is_auto = parse_momentum(settings.momentum) is None and not settings.asynchronous
    corrects = is_auto and isinstance(settings.optimizer, SGD) and not settings.overlap
    return Momentum(kind="exact-diffusion") if corrects else None


def data_differ(task: Task, execution: Execution) -> bool:
    """Whether the first gradients of a task's workers differ by more than batches explain.

    Every worker finds the same, from all workers' first batches; says so once where they do.
    """
    found = spread(_first_gradients(task, execution))
    if not found > _DIFFERENT:
        return False
    _log.warning(
        "workers' data differ: between workers, first gradients vary %.3g times as much as "
        "between batches. Momentum 'auto' is exact-diffusion.",
        found,
    )
    return True


def spread(gradients: Tensor) -> float:
    """How much more workers' gradients vary than batches explain; 1 where data are equal.

    The axes are batches, workers and values.

    >>> batches = torch.tensor([[[1.0], [1.0]], [[-1.0], [-1.0]]])
    >>> spread(batches), spread(batches + torch.tensor([[3.0], [-3.0]]))
    (0.0, 18.0)
    """
    number, workers, _ = gradients.shape
    if min(number, workers) < 2:
        return 0.0
    means = gradients.mean(0)
    within = float((gradients - means).square().sum()) / (workers * (number - 1))
    between = float((means - means.mean(0)).square().sum()) * number / (workers - 1)
    return between / max(within, 1e-300)


def _first_gradients(task: Task, execution: Execution) -> Tensor:
    """Some values of all workers' gradients on their first batches, at the initial model."""
    device = torch.device(execution.device)
    model = task.model().to(device, execution.dtype).train()
    states = [tuple(t.to(device) for t in task.initial_state())] * task.num_workers
    found = []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(task.seed)
        for inputs, targets in islice(first_batches(task, device), _FIRST):
            rows = []
            for i in range(task.num_workers):
                with execution.autocast():
                    loss, state = task.loss(model, inputs[i], targets[i], states[i])
                gradients = torch.autograd.grad(loss, list(model.parameters()))
                states[i] = tuple(tensor.detach() for tensor in state)
                flat = torch.cat([gradient.flatten() for gradient in gradients])
                rows.append(flat[:: -(-len(flat) // _SAMPLED)].double().cpu())
            found.append(torch.stack(rows))
    return torch.stack(found)
