"""The runner: simulated jobs one after another."""

from __future__ import annotations

from collections.abc import Iterator

from matcha.records import Record, holds_run
from matcha.simulation.engine import Engine
from matcha.simulation.run import Simulation
from matcha.tasks.jobs import Job, carry_out
from matcha.tasks.recipes import Choices

CHECKPOINT = "checkpoint.pt"


class Runner:
    """Carries jobs out one after another; jobs that differ only in their plan share an engine."""

    def __init__(self) -> None:
        self._made: tuple[str, Choices, Engine] | None = None

    def run(self, job: Job, *, resume: bool = False) -> Iterator[Record]:
        """Train a job, one record an epoch; a run that was stopped goes on where it stopped."""
        simulation = self._simulation(job)
        checkpoint = job.directory / CHECKPOINT
        resume = resume and holds_run(job.directory)
        if resume and checkpoint.exists():
            simulation.load(checkpoint)
        yield from carry_out(job, simulation, checkpoint, resume=resume)

    def _simulation(self, job: Job) -> Simulation:
        wanted = (job.recipe.name, job.choices)
        engine = self._made[2] if self._made is not None and self._made[:2] == wanted else None
        task = job.recipe.task(job.choices) if engine is None else engine.task
        simulation = Simulation(task, job.plan, job.settings, engine=engine)
        self._made = (*wanted, simulation.engine)
        return simulation
