"""Jobs: runs that write their directory as they go and can be taken up again, in either engine."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from matcha.errors import InputError
from matcha.plans import Events, PlanLike, StagedPlan
from matcha.records import (
    Entry,
    Record,
    RunHeader,
    RunKind,
    RunWriter,
    check_same,
    current_settings,
    differences,
    has_diverged,
    holds_run,
)
from matcha.strategies import with_budget, with_events
from matcha.training.differing import correction
from matcha.training.evaluation import Score
from matcha.training.momentum import Momentum, resolve_momentum
from matcha.training.settings import Settings
from matcha.training.task import Task, TaskSpec
from matcha.wires import Float


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run: a task trained by a plan."""

    directory: Path | None = None
    """Where it is recorded; None keeps a simulation's records in memory."""
    task: TaskSpec
    plan: PlanLike
    settings: Settings
    kind: RunKind = "simulation"
    name: str | None = None
    """What records call the run; None for its label."""
    events: Events = field(default_factory=Events)
    """What happens to the simulated network."""
    network: Mapping[str, Any] = field(default_factory=dict)
    """How real workers talk, for the run's header."""

    def __post_init__(self) -> None:
        if self.settings.asynchronous and self.events != Events():
            raise InputError(
                "events go by iterations, which workers that meet asynchronously do not share: "
                "leave one of the two out."
            )

    @property
    def folder(self) -> Path:
        """The directory, where there must be one."""
        if self.directory is None:
            raise InputError("real workers record their runs: give the job a directory.")
        return self.directory

    @property
    def label(self) -> str:
        """Strategy, budget, wire and seed in a few letters, or the name that was chosen."""
        return self.name or label(self.plan, self.task.seed)

    @property
    def momentum(self) -> Momentum:
        """How momentum and meetings go together, all decided."""
        settings = self.settings
        return resolve_momentum(settings.momentum, settings.optimizer, self.plan)

    def header(self) -> RunHeader:
        """What is run, for the run's directory."""
        is_open = correction(self.settings) is not None  # the first gradients decide
        config = {
            "choices": dict(self.task.choices),
            "settings": self.settings.describe(),
            "network": dict(self.network),
            "events": asdict(self.events) if self.events != Events() else {},
        }
        return RunHeader(
            name=self.label,
            kind=self.kind,
            task=self.task.name,
            strategy=self.plan.strategy,
            budget=self.plan.budget,
            seed=self.task.seed,
            num_workers=self.plan.num_workers,
            clock="wall" if self.kind == "training" else "simulated",
            wire=self.plan.wire.name,
            momentum="auto" if is_open else self.momentum.kind,
            config=json.loads(json.dumps({k: v for k, v in config.items() if v}, default=str)),
        )


def label(plan: PlanLike, seed: int) -> str:
    """A run's short name.

    >>> import matcha
    >>> label(matcha.plan(matcha.families.ring(4), 0.5, "periodic"), seed=1)
    'periodic-0.5-s1'
    >>> label(matcha.plan(matcha.families.ring(4), 0.1, "greedy", wire="modulo:3"), seed=0)
    'greedy-0.1-modulo3-s0'
    """
    name = f"{stem(plan)}-s{seed}"
    return f"staged-{name}" if isinstance(plan, StagedPlan) else name


def stem(plan: PlanLike) -> str:
    """Strategy, budget, and wire where messages are not whole: what names of runs begin with."""
    # A name of a directory too, and some places take a colon for a drive or a host.
    wire = "" if plan.wire == Float() else f"-{plan.wire.name.replace(':', '')}"
    return f"{plan.strategy}-{plan.budget:g}{wire}"


def make_jobs(
    task: TaskSpec,
    plans: Sequence[PlanLike],
    settings: Settings,
    *,
    output: Path | None,
    kind: RunKind = "simulation",
    events: Events | None = None,
) -> list[Job]:
    """One job per plan, each in its own directory below ``output`` if there is one.

    A plan that is given again is run again, in a directory with a number.
    """
    events = events or Events()
    job = partial(Job, task=task, settings=settings, kind=kind, events=events)
    return [
        job(directory=output and output / name, plan=with_events(plan, events))
        for plan, name in zip(plans, _numbered(plans, task.seed), strict=True)
    ]


def with_asynchronous(jobs: Sequence[Job]) -> list[Job]:
    """The jobs, and beside each whose workers meet in pairs the same asynchronously."""
    found = []
    for job in jobs:
        found.append(job)
        if all(level.process.has_meetings for level in job.plan.levels):
            name = f"{with_budget(job.plan.strategy, job.plan.budget)}, asynchronous"
            settings, place = replace(job.settings, asynchronous=True), job.directory
            place = place and place.with_name(f"{place.name}-asynchronous")
            found.append(replace(job, directory=place, settings=settings, name=name))
    return found


def _numbered(plans: Sequence[PlanLike], seed: int) -> Iterator[str]:
    """The plans' labels, told apart by a number where one comes again: `a`, `b`, `a-2`."""
    seen: Counter[str] = Counter()
    for plan in plans:
        name = label(plan, seed)
        seen[name] += 1
        yield name if seen[name] == 1 else f"{name}-{seen[name]}"


def check_free(jobs: Sequence[Job], *, resume: bool) -> None:
    """Refuse to start when a job's directory holds a run and resuming was not asked for.

    Raises:
        InputError: Such a directory exists, two jobs share one, or a run that is to be resumed
            was started with other choices.
    """
    places = [job.directory for job in jobs if job.directory is not None]
    if len(set(places)) != len(places):
        raise InputError("two runs would write to the same directory: name each choice once")
    for job in jobs:
        if job.directory is None or not holds_run(job.directory):
            continue
        if not resume:
            raise InputError(
                f"{str(job.directory)!r} already holds a run: choose another --output, or "
                "--resume it"
            )
        check_same(job.directory, job.header())


class Trainer(Protocol):
    """What carries a job out, an epoch at a time: all workers simulated, or one of the real ones.

    Iterating yields what is to be recorded: each epoch ends with the record over all workers.
    """

    @property
    def iteration(self) -> int:
        """Finished iterations."""

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to train."""

    def __iter__(self) -> Iterator[Entry]:
        """Train."""

    def save(self, path: Path) -> object:
        """Write all that the next epoch depends on."""


class Journal:
    """What is written of a run as it goes: its records, and a checkpoint when one is due.

    Args:
        save: writes a checkpoint.
        every: epochs between checkpoints, 0 for none; None as often as takes at most a twentieth
            of the time. The end of the run is saved too, except with 0.
        writer: of the run's directory; None where this process writes no records.
    """

    def __init__(
        self, save: Callable[[], object], every: int | None, writer: RunWriter | None = None
    ) -> None:
        self.writer = writer
        self._save, self._every = save, every
        self._saved, self._cost = -math.inf, 0.0

    def add(self, entry: Entry, *, is_last: bool = False) -> None:
        """Write an entry; a record over all workers may be followed by a checkpoint."""
        # The record first: a crash in between repeats an epoch, and never loses one.
        if self.writer is not None:
            self.writer.record(entry)
        if not isinstance(entry, Record) or entry.worker is not None:
            return
        started, every = time.perf_counter(), self._every
        if every is None:
            due = started - self._saved > 20 * self._cost
        else:
            due = every > 0 and entry.epoch % every == 0
        if due or (is_last and every != 0):
            self._save()
            self._saved = time.perf_counter()
            self._cost = self._saved - started


def carry_out(
    job: Job,
    trainer: Trainer,
    checkpoint: Path,
    *,
    resume: bool = False,
    checkpoint_every: int | None = None,
    primary: bool | Callable[[], bool] = True,
) -> Iterator[Record]:
    """Train a job and record it, one record per epoch over all workers.

    Args:
        job: what is run.
        trainer: made for the job's task, plan and settings; when resuming, at its checkpoint.
        checkpoint: where the trainer saves.
        resume: go on with the run in the job's directory; what it recorded after the checkpoint
            is dropped, as it will be trained again.
        checkpoint_every: epochs between checkpoints, as for `Journal`.
        primary: whether this process writes what is of the run as a whole; a function where that
            may change hands.
    """
    after = trainer.iteration if resume else None
    with RunWriter(job.folder, job.header(), job.plan, after=after, primary=primary) as writer:
        journal = Journal(partial(trainer.save, checkpoint), checkpoint_every, writer)
        for entry in trainer:
            journal.add(entry, is_last=trainer.is_over)
            if isinstance(entry, Record) and entry.worker is None:
                yield entry


# -- how far a run is, and what a checkpoint of it may be continued with

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
