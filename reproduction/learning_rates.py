"""Tuning a learning rate: a walk over candidates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from reproduction.trials import Result


def tuning_loss(result: Result) -> float:
    """What a rate is judged by: the average model's loss, infinite where training failed."""
    loss = result.final("train_loss")
    loss = result.final("worker_loss") if loss is None else loss
    return float("inf") if loss is None or loss != loss else loss


def best_rate(rates: Sequence[float], loss: Callable[[float], float]) -> float:
    """The rate with the lowest loss, found by walking downhill from the middle of the candidates.

    Each trial is a training, so only what brackets the answer is tried: upwards as long as it
    helps, and downwards if the first step up did not.

    Args:
        rates: candidates, rising.
        loss: trains with a rate; infinite where training fails.

    >>> tried = []
    >>> def loss(rate):
    ...     tried.append(rate)
    ...     return abs(rate - 0.2)
    >>> best_rate([0.05, 0.1, 0.2, 0.4, 0.8], loss), tried
    (0.2, [0.2, 0.4, 0.1])
    """
    best = start = len(rates) // 2
    losses = {start: loss(rates[start])}
    for step in (1, -1):
        if step == -1 and best != start:
            break
        while 0 <= (following := best + step) < len(rates):
            losses[following] = loss(rates[following])
            if losses[following] >= losses[best]:
                break
            best = following
    return rates[best]
