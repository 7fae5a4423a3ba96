"""Turns: a round's meetings one after another, for what looks at each of them by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from matcha.distributed.exchange.exchange import Meeting
from matcha.rounds import Round

__all__ = ["Around", "Runner", "copy_values", "take_turns"]


class Runner(Protocol):
    """What carries out one worker's part of a round."""

    timeout: float

    @property
    def wait_seconds(self) -> float:
        """Spent waiting for partners so far."""

    def run(self, round: Round, met: Sequence[Meeting], iteration: int) -> None:
        """As `Exchange.run`."""


class Around:
    """What stands around a runner, and has its deadline and its waiting."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    @property
    def timeout(self) -> float:
        """Seconds to wait for any one message."""
        return self._runner.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._runner.timeout = seconds

    @property
    def wait_seconds(self) -> float:
        """Spent waiting for partners so far."""
        return self._runner.wait_seconds


def take_turns(
    values: Sequence[torch.Tensor],
    round: Round,
    met: Sequence[Meeting],
    hold: Callable[[Meeting], bool],
) -> None:
    """Hold the meetings of a round one by one.

    Args:
        values: what they change.
        round: what is active.
        met: this worker's meetings in it.
        hold: carries one out, on values as they are; whether it took place.
    """
    if round.mixing == "pairwise" or len(met) == 1:
        for meeting in met:
            hold(meeting)
        return
    # Every partner of a Laplacian round gets the values before it; changes add up elsewhere.
    start = [value.clone() for value in values]
    total = [value.clone() for value in start]
    for meeting in met:
        copy_values(values, start)
        if hold(meeting):
            for sum_, value, old in zip(total, values, start, strict=True):
                sum_.add_(value.sub(old))
    copy_values(values, total)


def copy_values(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Overwrite tensors by others of their shapes."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
