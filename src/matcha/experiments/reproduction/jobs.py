"""Jobs: simulated runs that write their directory as they go and can be taken up again."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from matcha.documents import write_atomically
from matcha.errors import InputError
from matcha.plans import AnyPlan, StagedPlan
from matcha.records import Record, RunHeader, RunKind, RunWriter, read_run
from matcha.simulation import Engine, Settings, Simulation
from matcha.tasks.recipes import Choices, Recipe

CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run: a recipe's task trained by a plan into a directory."""

    directory: Path
    recipe: Recipe
    choices: Choices
    plan: AnyPlan
    settings: Settings
    kind: RunKind = "simulation"
    command: tuple[str, ...] = ()
    """How it was asked for, kept in the run's header."""

    @property
    def label(self) -> str:
        """Strategy, budget and seed in a few letters.

        A directory under the campaign's folder has this name.
        """
        return label(self.plan, self.choices.seed)

    def header(self) -> RunHeader:
        """What was run, for the run's directory."""
        config: dict[str, Any] = {
            "choices": {
                k: str(v) if isinstance(v, Path) else v for k, v in asdict(self.choices).items()
            },
            "settings": self.settings.describe(),
        }
        if self.command:
            config["command"] = list(self.command)
        return RunHeader(
            name=self.label,
            kind=self.kind,
            task=self.recipe.name,
            strategy=self.plan.strategy,
            budget=self.plan.budget,
            seed=self.choices.seed,
            num_workers=self.plan.num_workers,
            clock="simulated",
            config=json.loads(json.dumps(config)),
        )


def label(plan: AnyPlan, seed: int) -> str:
    """A run's short name.

    >>> import matcha
    >>> label(matcha.plan(matcha.families.ring(4), 0.5, "periodic"), seed=1)
    'periodic-0.5-s1'
    """
    stem = f"{plan.strategy}-{plan.budget:g}-s{seed}"
    return f"staged-{stem}" if isinstance(plan, StagedPlan) else stem


def check_free(jobs: Sequence[Job], *, resume: bool) -> None:
    """Refuse to start when a job's directory holds a run and resuming was not asked for.

    Raises:
        InputError: Such a directory exists, two jobs share one, or a run that is to be resumed
            was started with other choices.
    """
    places = [job.directory for job in jobs]
    if len(set(places)) != len(places):
        raise InputError("two runs would write to the same directory: name each choice once")
    for job in jobs:
        if not (job.directory / "run.json").exists():
            continue
        if not resume:
            raise InputError(
                f"{str(job.directory)!r} already holds a run: choose another --output, or "
                "--resume it"
            )
        _check_same(job)


def _check_same(job: Job) -> None:
    """Refuse to go on with a run under other choices: its records would not be of one run."""
    theirs, mine = read_run(job.directory).header, job.header()
    changed = [] if theirs.task == mine.task else ["task"]
    for part, free in (("choices", {"data"}), ("settings", {"epochs"})):
        before = theirs.config.get(part, {})
        changed += [
            name
            for name, value in mine.config[part].items()
            if name not in free and name in before and before[name] != value
        ]
    if changed:
        raise InputError(
            f"{str(job.directory)!r} was started with another {' and '.join(changed)}: --resume "
            "it as it was, or start a new run"
        )


class Runner:
    """Carries jobs out one after another; jobs that differ only in their plan share an engine."""

    def __init__(self) -> None:
        self._made: tuple[str, Choices, Engine] | None = None

    def run(self, job: Job, *, resume: bool = False) -> Iterator[Record]:
        """Train a job, one record an epoch; a run that was stopped goes on where it stopped."""
        simulation = self._simulation(job)
        checkpoint = job.directory / CHECKPOINT
        existing = resume and (job.directory / "run.json").exists()
        if existing:
            if checkpoint.exists():
                simulation.load(checkpoint)
            _forget(job.directory / "records.jsonl", after=simulation.iteration)
        with RunWriter(job.directory, job.header(), job.plan, resume=existing) as writer:
            saved, cost = -math.inf, 0.0
            for record in simulation:
                # The record first: a crash in between repeats an epoch, and never loses one.
                writer.record(record)
                over = simulation.diverged or simulation.epoch == job.settings.epochs
                started = time.perf_counter()
                if over or started - saved > 20 * cost:  # large models: at most 5 % of the time
                    simulation.save(checkpoint)
                    saved = time.perf_counter()
                    cost = saved - started
                yield record

    def _simulation(self, job: Job) -> Simulation:
        wanted = (job.recipe.name, job.choices)
        engine = self._made[2] if self._made is not None and self._made[:2] == wanted else None
        task = job.recipe.task(job.choices) if engine is None else engine.task
        simulation = Simulation(task, job.plan, job.settings, engine=engine)
        self._made = (*wanted, simulation.engine)
        return simulation


def _forget(path: Path, *, after: int) -> None:
    """Drop records that a checkpoint does not cover: their epochs will be run again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["iteration"] <= after:
                kept.append(line + "\n")
        except ValueError:
            break  # cut short by a crash
    write_atomically(path, "".join(kept))


def make_jobs(
    recipe: Recipe,
    plans: Sequence[AnyPlan],
    choices: Choices,
    settings: Settings,
    *,
    seeds: Sequence[int],
    output: Path,
    kind: RunKind = "simulation",
    command: tuple[str, ...] = (),
) -> list[Job]:
    """One job for every plan and seed, each in its own directory below ``output``."""
    return [
        Job(
            directory=output / label(plan, seed),
            recipe=recipe,
            choices=replace(choices, seed=seed),
            plan=plan,
            settings=settings,
            kind=kind,
            command=command,
        )
        for seed in seeds
        for plan in plans
    ]
