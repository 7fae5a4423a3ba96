"""Settings: how to train, on which device, and by which simulated clock."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import torch

from matcha.errors import InputError
from matcha.records import has_diverged
from matcha.topology.topology import MAX_SECONDS
from matcha.training.clipping import check_clip
from matcha.training.momentum import Momentum, momentum_for
from matcha.training.optimizers import SGD, Optimizer
from matcha.training.rates import Constant, RateSchedule

Statistics: TypeAlias = Literal["recalibrated", "averaged"]
Batching: TypeAlias = Literal["auto", "loop", "vmap", "stacked"]
Precision: TypeAlias = Literal["float32", "float64", "bfloat16"]

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.float32}


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """Device and precision of an iteration: they change speed, and results in the last bits."""

    device: str = "cpu"
    precision: Precision = "float32"
    """``bfloat16`` keeps float32 parameters and computes under autocast."""
    batching: Batching = "auto"
    """Simulation: workers' passes one by one, or as one batched computation: by ``vmap``, or
    ``stacked``, for models that compute with the parameters of several workers themselves."""
    streams: int = 8
    """Simulation on CUDA: how many workers' passes may overlap."""
    capture: bool = True
    """Simulation on CUDA: replay captured graphs instead of launching kernel by kernel."""
    compile: bool = False
    """Simulation: compile the model's blocks first; pays on CUDA for long runs."""

    def __post_init__(self) -> None:
        for name, known in (("precision", get_args(Precision)), ("batching", get_args(Batching))):
            if (chosen := getattr(self, name)) not in known:
                raise InputError(f"{name} must be one of {', '.join(known)}, not {chosen!r}")
        if self.streams < 1:
            raise InputError(f"streams must be 1 or more, not {self.streams}")
        kind = self.device.partition(":")[0]
        if kind not in ("cpu", "cuda"):
            raise InputError(f"device must be cpu or cuda, not {self.device!r}")
        if kind == "cuda" and not torch.cuda.is_available():
            raise InputError("device 'cuda' asks for an NVIDIA GPU, and PyTorch sees none here")

    @classmethod
    def auto(cls, device: str = "auto", precision: str = "auto", **choices: Any) -> Execution:
        """On a GPU in bfloat16 where PyTorch sees one, otherwise on the CPU in float32."""
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if precision == "auto":
            precision = "bfloat16" if device.startswith("cuda") else "float32"
        return cls(device=device, precision=precision, **choices)  # type: ignore[arg-type]

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the parameters that the optimizer updates."""
        return _DTYPES[self.precision]

    @property
    def compute_dtype(self) -> torch.dtype:
        """Precision in which models compute."""
        return torch.bfloat16 if self.precision == "bfloat16" else self.dtype

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """The context in which models compute at this precision."""
        if self.precision != "bfloat16":
            return contextlib.nullcontext()
        # The weight cache would hand one captured graph's casts to its next replay.
        kind = torch.device(self.device).type
        return torch.autocast(kind, torch.bfloat16, cache_enabled=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Delays:
    """The simulated clock: an iteration costs computing plus what its round exchanges.

    >>> Delays(compute_time=0.045, link_time=0.007).of(units=5.0, unit="units")
    0.035
    """

    compute_time: float | None = None
    """Seconds of one worker's gradient; None takes the first epoch's time on this device over m."""
    link_time: float = 0.01
    """Seconds of a matching, for plans that count in units."""
    speeds: tuple[float, ...] = ()
    """Each worker's: 0.25 takes four times the seconds per gradient. With speeds a worker in step
    waits for the partners of its round only; without any the clock counts whole rounds."""

    def __post_init__(self) -> None:
        for name in ("compute_time", "link_time"):
            value = getattr(self, name)
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise InputError(f"{name} must be a number of seconds, not {value}")
            if value is not None and value > MAX_SECONDS:
                raise InputError(f"{name} is {value:g}, but it is at most {MAX_SECONDS:g} seconds")
        if not all(speed > 0 and math.isfinite(speed) for speed in self.speeds):
            raise InputError(f"speeds must be above 0, not {', '.join(map(str, self.speeds))}")

    def of(self, units: float, unit: str) -> float:
        """Seconds of communication."""
        return units * self.link_time if unit == "units" else units


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How to train; the task says what is trained, and the plan who talks when."""

    epochs: int
    schedule: RateSchedule = field(default_factory=lambda: Constant(base=0.1))
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
        momentum_for(self.momentum, self.optimizer)
        target = self.target_loss
        if target is not None and not math.isfinite(target):
            raise InputError(f"the target loss must be a number, not {target}")
        if self.statistics not in ("recalibrated", "averaged"):
            raise InputError(f"statistics must be recalibrated or averaged: {self.statistics!r}")

    def is_due(self, epoch: int) -> bool:
        """Whether the average model is evaluated after an epoch, counted from 1.

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
        """Whether training ends here: all epochs done, the target held, or diverged."""
        if epoch >= self.epochs:
            return True
        if worker_loss is not None and has_diverged(worker_loss):
            return True
        target, last = self.target_loss, train_losses[-2:]
        return target is not None and len(last) == 2 and max(last) <= target

    def describe(self) -> dict[str, Any]:
        """The settings in the words of JSON."""
        kinds = {
            "schedule_kind": type(self.schedule).__name__,
            "optimizer_kind": type(self.optimizer).__name__,
        }
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self) | kinds))
        # What was not chosen is left out: runs and checkpoints older than the option go on.
        if not self.asynchronous:
            del plain["asynchronous"]
        # In files delays have the names of 0.2: runs and checkpoints of it go on.
        delays = plain["delays"]
        named = {"compute_seconds": "compute_time", "seconds_per_unit": "link_time"}
        plain["delays"] = {old: delays[name] for old, name in named.items()}
        if self.delays.speeds:
            plain["delays"]["speeds"] = delays["speeds"]
        return plain
