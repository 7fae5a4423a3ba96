"""Settings: how to train, for either engine."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from matcha.errors import InputError
from matcha.records import has_diverged
from matcha.training.clipping import check_clip
from matcha.training.delays import Delays
from matcha.training.execution import Execution
from matcha.training.momentum import Momentum
from matcha.training.optimizers import SGD, Optimizer
from matcha.training.rates import Constant, Schedule

Statistics: TypeAlias = Literal["recalibrated", "averaged"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How to train; what is trained is the task's, who talks when is the plan's."""

    epochs: int
    schedule: Schedule = field(default_factory=lambda: Constant(base=0.1))
    optimizer: Optimizer = field(default_factory=SGD)
    momentum: str | Momentum = "local"
    """How momentum and meetings go together: one of `matcha.training.momentum.MOMENTA`."""
    clip: float | None = None
    """The furthest that a meeting may move a worker, in times the disagreement that the plan
    predicts; None: no bound."""
    overlap: bool = False
    """Mix before the step, x ← Wx − ηu, so that the exchange overlaps the gradient (the paper's
    footnote), and not after it, x ← W(x − ηu) (eq. 2)."""
    evaluate_every: int = 1
    """Epochs between evaluations of the average model. The last epoch is always evaluated, and
    every epoch is where the learning rate follows the loss."""
    statistics: Statistics = "recalibrated"
    """BatchNorm statistics of the average model: measured again on training data, or averaged."""
    target_loss: float | None = None
    """Stop when two evaluations in a row find the average model's training loss at or below."""
    delays: Delays = field(default_factory=Delays)
    """The simulated clock; real workers have a clock on the wall."""
    asynchronous: bool = False
    """Workers meet when both have time, each at its own pace."""
    execution: Execution = field(default_factory=Execution)

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.evaluate_every < 1:
            raise InputError(
                f"epochs and evaluate_every must be 1 or more, not {self.epochs} and "
                f"{self.evaluate_every}"
            )
        if self.clip is not None:
            check_clip(self.clip)
        target = self.target_loss
        if target is not None and not math.isfinite(target):
            raise InputError(f"the target loss must be a number, not {target}")
        if self.statistics not in ("recalibrated", "averaged"):
            raise InputError(f"statistics must be recalibrated or averaged: {self.statistics!r}")

    def is_due(self, epoch: int) -> bool:
        """Whether the average model is evaluated after so many epochs.

        >>> from matcha.training.rates import Plateau
        >>> [Settings(epochs=5, evaluate_every=2).is_due(epoch) for epoch in (1, 2, 3, 4, 5)]
        [False, True, False, True, True]
        >>> Settings(epochs=5, evaluate_every=2, schedule=Plateau(base=1.0)).is_due(1)
        True
        """
        last = epoch == self.epochs
        return last or self.schedule.follows_loss or epoch % self.evaluate_every == 0

    def is_over(
        self, epoch: int, worker_loss: float | None, train_losses: Sequence[float] = ()
    ) -> bool:
        """Whether training ends here: all epochs done, the target held, or the loss lost.

        Args:
            epoch: finished epochs.
            worker_loss: the workers' own, in the last epoch.
            train_losses: the average model's, by evaluation.
        """
        if epoch >= self.epochs:
            return True
        if worker_loss is not None and has_diverged(worker_loss):
            return True
        target, last = self.target_loss, train_losses[-2:]
        return target is not None and len(last) == 2 and max(last) <= target

    def describe(self) -> dict[str, Any]:
        """The settings in the words of JSON."""
        named = {
            "schedule": type(self.schedule).__name__,
            "optimizer": type(self.optimizer).__name__,
        }
        described = asdict(self) | {f"{key}_kind": value for key, value in named.items()}
        plain: dict[str, Any] = json.loads(json.dumps(described))
        # What nobody chose is left out: runs and checkpoints from before it was there go on.
        if not self.asynchronous:
            del plain["asynchronous"]
        if not self.delays.speeds:
            del plain["delays"]["speeds"]
        return plain
