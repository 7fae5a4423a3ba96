"""Settings: how to train, for either engine."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from matcha.errors import InputError
from matcha.tasks.delays import Delays
from matcha.tasks.execution import Execution
from matcha.tasks.momentum import Momentum
from matcha.tasks.optimizers import SGD, Optimizer
from matcha.tasks.rates import Constant, Schedule

Rule: TypeAlias = Literal["eq2", "footnote"]
Statistics: TypeAlias = Literal["recalibrated", "averaged"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How to train; what is trained is the task's, who talks when is the plan's."""

    epochs: int
    schedule: Schedule = field(default_factory=lambda: Constant(base=0.1))
    optimizer: Optimizer = field(default_factory=SGD)
    momentum: str | Momentum = "local"
    """How momentum and meetings go together: one of `matcha.tasks.momentum.MOMENTA`."""
    wire: str | None = None
    """What messages hold; None: what the plan says."""
    rule: Rule = "eq2"
    """``eq2`` mixes after the step, x ← W(x − ηu); ``footnote`` before it, x ← Wx − ηu."""
    evaluate_every: int = 1
    """Epochs between evaluations of the average model. The last epoch is always evaluated, and
    every epoch is where the learning rate follows the loss."""
    statistics: Statistics = "recalibrated"
    """BatchNorm statistics of the average model: measured again on training data, or averaged."""
    target_loss: float | None = None
    """Stop after the epoch in which the mean training loss reaches this."""
    delays: Delays = field(default_factory=Delays)
    """The simulated clock; real workers have a clock on the wall."""
    execution: Execution = field(default_factory=Execution)

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.evaluate_every < 1:
            raise InputError(
                f"epochs and evaluate_every must be 1 or more, not {self.epochs} and "
                f"{self.evaluate_every}"
            )
        if self.rule not in ("eq2", "footnote"):
            raise InputError(f"rule must be eq2 or footnote, not {self.rule!r}")
        if self.statistics not in ("recalibrated", "averaged"):
            raise InputError(f"statistics must be recalibrated or averaged: {self.statistics!r}")

    def is_due(self, epoch: int) -> bool:
        """Whether the average model is evaluated after so many epochs.

        >>> from matcha.tasks.rates import Plateau
        >>> [Settings(epochs=5, evaluate_every=2).is_due(epoch) for epoch in (1, 2, 3, 4, 5)]
        [False, True, False, True, True]
        >>> Settings(epochs=5, evaluate_every=2, schedule=Plateau(base=1.0)).is_due(1)
        True
        """
        last = epoch == self.epochs
        return last or self.schedule.follows_loss or epoch % self.evaluate_every == 0

    def is_over(self, epoch: int, train_loss: float | None) -> bool:
        """Whether training ends here: all epochs done, the target reached, or the loss lost."""
        if epoch >= self.epochs:
            return True
        if train_loss is None:
            return False
        reached = self.target_loss is not None and train_loss <= self.target_loss
        return reached or not math.isfinite(train_loss)

    def describe(self) -> dict[str, Any]:
        """The settings in the words of JSON."""
        named = {
            "schedule": type(self.schedule).__name__,
            "optimizer": type(self.optimizer).__name__,
        }
        described = asdict(self) | {f"{key}_kind": value for key, value in named.items()}
        plain: dict[str, Any] = json.loads(json.dumps(described))
        return plain
