"""One training run of an experiment as a value, and its result as a line of JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from matcha._io import decode_number, encode_number
from matcha.errors import InputError
from matcha.plans import Plan
from matcha.records import Record, has_diverged
from matcha.simulation import Engine, Settings, Simulation, Task
from matcha.strategies import with_budget


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What is run: a task on a topology by a strategy at a budget, with a seed."""

    task: str
    topology: str
    strategy: str
    budget: float
    seed: int = 0
    learning_rate: float | None = None
    """None takes the rate tuned on vanilla."""
    stretch: float = 1.0
    """Epochs as a multiple of vanilla's: with cheap rounds more of them fit into its time."""
    epochs: int | None = None

    @property
    def label(self) -> str:
        """As legends show it.

        >>> Trial(task="digits", topology="paper:er8", strategy="matcha", budget=0.5).label
        'matcha 0.5'
        """
        name = with_budget(self.strategy, self.budget)
        return name if self.stretch == 1 else f"{name}, {self.stretch:g} × epochs"

    @property
    def plan_file(self) -> str:
        """The name of its plan's file."""
        place = self.topology.replace(":", "-").replace("/", "-")
        return f"{place}_{self.strategy}_{self.budget:g}_s{self.seed}.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """An trial that was run, with one record an epoch."""

    trial: Trial
    records: tuple[Record, ...]
    device: str
    seconds: float
    """Of the whole run on that device."""
    plan: dict[str, Any]
    """The plan's figures: rho, consensus error, units per iteration, digest."""
    config: dict[str, Any]

    @property
    def diverged(self) -> bool:
        """The loss was no longer finite."""
        loss = self.records[-1].worker_loss
        return loss is None or has_diverged(loss)

    def final(self, name: str, epochs: int = 1) -> float | None:
        """A field's mean over the last ``epochs`` records that have it; None if none has."""
        values = [v for r in self.records if (v := getattr(r, name)) is not None][-epochs:]
        return sum(values) / len(values) if values else None

    def to_line(self) -> str:
        """One line of JSON."""
        document = asdict(self)
        document["item"] = document.pop("trial")  # as it was called when the first were written
        document["records"] = [
            {key: _rounded(value) for key, value in record.items() if value is not None}
            for record in document["records"]
        ]
        return json.dumps(document)

    @classmethod
    def from_line(cls, line: str) -> Result:
        """Read what :meth:`to_line` wrote."""
        document = json.loads(line)
        known = {field.name for field in fields(Record)}
        document["trial"] = Trial(**document.pop("item"))
        document["records"] = tuple(
            Record(**{key: decode_number(value) for key, value in record.items() if key in known})
            for record in document["records"]
        )
        if all(record.worker_loss is None for record in document["records"]):
            document["records"] = tuple(
                replace(record, train_loss=None, worker_loss=record.train_loss)
                for record in document["records"]
            )
        return cls(**document)


def _rounded(value: Any) -> Any:
    value = encode_number(value)
    return float(f"{value:.7g}") if isinstance(value, float) else value


def run_trial(
    trial: Trial, task: Task, plan: Plan, settings: Settings, *, engine: Engine | None = None
) -> Result:
    """Train one trial to its end (or until its loss is no longer finite)."""
    started = time.perf_counter()
    simulation = Simulation(task, plan, settings, engine=engine)
    records = tuple(simulation)
    return result_of(trial, simulation, records, time.perf_counter() - started)


def result_of(
    trial: Trial, simulation: Simulation, records: Sequence[Record], seconds: float
) -> Result:
    """What a simulation that has come to its end makes of a trial."""
    plan, settings, task = simulation.plan.level_at(0), simulation.settings, simulation.task
    return Result(
        trial=replace(trial, epochs=settings.epochs),
        records=tuple(records),
        device=_device_name(simulation.engine),
        seconds=seconds,
        plan={
            "rho": plan.rho,
            "consensus_error": plan.consensus_error,
            "expected_comm_time": plan.expected_comm_time,
            "num_colors": plan.num_colors,
            "digest": plan.digest,
        },
        config=settings.describe() | {"steps_per_epoch": task.steps_per_epoch},
    )


def _device_name(engine: Engine) -> str:
    import platform

    import torch

    if engine.on_cuda:
        return torch.cuda.get_device_name(engine.device)
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"


def read_results(paths: Iterable[str | Path]) -> Iterator[Result]:
    """Results from files of JSON lines; of a trial that was run twice, the later one.

    Raises:
        InputError: A file cannot be read or is not such a file.
    """
    found: dict[Trial, Result] = {}
    for path in paths:
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise InputError(f"{str(path)!r} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise InputError(f"{str(path)!r} does not hold results: it is not text") from None
        for place, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                result = Result.from_line(line)
            except (ValueError, KeyError, TypeError, AttributeError):
                raise InputError(
                    f"{str(path)!r} does not hold results: line {place} is not one, or is damaged"
                ) from None
            found[result.trial] = result
    return iter(found.values())
