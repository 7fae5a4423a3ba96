"""Progress: how far a run is, and what a checkpoint of it may be continued with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from matcha.errors import InputError
from matcha.plans import PlanLike
from matcha.records import current_settings, differences, has_diverged
from matcha.training.evaluation import Score
from matcha.training.settings import Settings
from matcha.training.task import Task

_NAMES_OF_0_2 = {
    "ticks": "epoch",
    "losses": "test_losses",
    "units": "comm_units",
    "time": "seconds",
    "megabytes_sent": "megabytes",
}


@dataclass(kw_only=True, slots=True)
class Progress:
    """How far a run is: all that an engine keeps beside models, momentum and wires.

    >>> Progress.read({"ticks": 3, "losses": [0.5]})
    Progress(epoch=3, worker_loss=None, train_losses=[], test_losses=[0.5], comm_units=0.0, \
seconds=0.0, megabytes=0.0)
    """

    epoch: int = 0
    """Finished epochs."""
    worker_loss: float | None = None
    """The workers' own, in the last epoch."""
    train_losses: list[float] = field(default_factory=list)
    """The average model's, per evaluation."""
    test_losses: list[float] = field(default_factory=list)
    """Likewise on held-out data; learning rates may follow them."""
    comm_units: float = 0.0
    seconds: float = 0.0
    megabytes: float = 0.0

    @property
    def diverged(self) -> bool:
        """Whether the workers' loss is NaN, or beyond all reason."""
        return self.worker_loss is not None and has_diverged(self.worker_loss)

    def is_over(self, settings: Settings) -> bool:
        """Whether there is nothing left to train."""
        return settings.is_over(self.epoch, self.worker_loss, self.train_losses)

    def add(self, score: Score) -> None:
        """Note an evaluation of the average model."""
        self.train_losses.append(score.train_loss)
        self.test_losses.append(score.test.loss)

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Progress:
        """The progress that `dataclasses.asdict` wrote, or 0.2; other entries are left out."""
        known = {f.name for f in fields(cls)}
        named = {_NAMES_OF_0_2.get(name, name): value for name, value in document.items()}
        return cls(**{name: value for name, value in named.items() if name in known})


def identity(task: Task, plan: PlanLike, settings: Settings) -> dict[str, Any]:
    """Say what is trained, by which plan and how, in plain values."""
    trained = {
        "task": task.name,
        "seed": task.seed,
        "number of workers": task.num_workers,
        **task.identity(),
    }
    found = {"plan": plan.digest, "task": trained, "settings": settings.describe()}
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


def check_identity(path: Path, saved: Mapping[str, Any] | None, now: Mapping[str, Any]) -> None:
    """Refuse to go on with a checkpoint of something else."""
    if saved is None:
        raise InputError(
            f"{str(path)!r} does not say what was trained (matcha 0.1 wrote it, or a script of "
            "its own): resume it with what wrote it, or start the run again without --resume"
        )
    changed = [] if saved["plan"] == now["plan"] else ["plan"]
    changed += differences(saved["task"], now["task"])
    changed += differences(current_settings(saved["settings"]), now["settings"])
    if changed:
        raise InputError(
            f"{str(path)!r} was written with another {' and '.join(changed)}: "
            "resume it as it was, or start a new run"
        )


def check_schema(path: Path, schema: object, expected: str) -> None:
    """Refuse a checkpoint that another version wrote."""
    if schema != expected:
        raise InputError(
            f"{str(path)!r} is a checkpoint of another version ({schema!r}, not {expected!r}): "
            "resume it with the matcha that wrote it, or start the run again without --resume"
        )
