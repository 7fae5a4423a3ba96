"""Whether workers' data differ, as their first gradients tell, and what `auto` then is.

Gradients at the same parameters differ between batches of one worker, and between workers. Where
all draw from the same data, the means of a worker's gradients differ by what batches do and no
more: the ratio of the two, as in an analysis of variance, is about 1. Measured on digits for eight
workers: 0.9 for equal data, 1.3 for Dirichlet(10), 8 for Dirichlet(1), 60 for Dirichlet(0.1).
"""

from __future__ import annotations

from torch import Tensor

from matcha.training.momentum.settings import Momentum
from matcha.training.optimizers import SGD, Optimizer

DIFFERING = "workers' data differ, as their first gradients tell: momentum 'auto' is %s"
"""What is said once."""
FIRST = 8
"""Gradients of each worker that are looked at."""
_SAMPLED = 1 << 14  # of a gradient's values: their spread is known to a percent
_DIFFERENT = 3.0  # the ratio from which data differ


def sample_values(gradients: Tensor) -> Tensor:
    """Some values of each row, evenly spread."""
    return gradients[..., :: -(-gradients.shape[-1] // _SAMPLED)].double()


def spread(gradients: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of a worker's first gradients, and their variance around it.

    Args:
        gradients: the first axis is the iteration.
    """
    mean = gradients.mean(0)
    return mean, (gradients - mean).square().sum((0, -1)) / (len(gradients) - 1)


def data_differ(between: float, within: float, workers: int, number: int) -> bool:
    """Whether workers' mean gradients differ by more than batches explain.

    Args:
        between: the mean squared distance of a worker's mean gradient from that of all.
        within: the variance of a worker's gradients, in the mean over workers.
        workers: how many there are.
        number: of gradients of each.

    >>> data_differ(1.0, 8.0, workers=8, number=8), data_differ(4.0, 8.0, workers=8, number=8)
    (False, True)
    """
    return number * workers / max(1, workers - 1) * between > _DIFFERENT * within


def rows_differ(gradients: Tensor) -> bool:
    """The same for the gradients of all workers: iterations, workers, values."""
    if len(gradients) < 2:
        return False
    means, within = spread(gradients)
    between = float((means - means.mean(0)).square().sum(-1).mean())
    return data_differ(between, float(within.mean()), gradients.shape[1], len(gradients))


def corrected(optimizer: Optimizer) -> Momentum | None:
    """What is best, as measured, where data differ; None: as where they do not."""
    return Momentum(kind="exact-diffusion") if isinstance(optimizer, SGD) else None
