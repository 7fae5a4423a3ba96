"""The runner: simulated jobs one after another."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from matcha.records import Record, holds_run, read_run
from matcha.simulation.asynchronous import AsynchronousSimulation
from matcha.simulation.engine import Engine
from matcha.simulation.run import Simulation
from matcha.training.jobs import Job, carry_out
from matcha.training.task import TaskSpec

CHECKPOINT = "checkpoint.pt"


class Runner:
    """Carries jobs out one after another; jobs that differ only in their plan share an engine.

    All share one clock: the seconds of a gradient are measured once, apart from any run, so that
    neither the order of the jobs nor what else the machine does favours one of them.

    Args:
        jobs: those that are compared; of runs that are gone on with, the clock is theirs.
    """

    def __init__(self, jobs: Sequence[Job] = ()) -> None:
        self._made: tuple[TaskSpec, Engine] | None = None
        self._clock = next((c for job in jobs if (c := _recorded(job)) is not None), None)

    def run(self, job: Job, *, resume: bool = False) -> Iterator[Record]:
        """Train a job, one record an epoch; a run that was stopped goes on where it stopped."""
        simulation = self._simulation(job)
        checkpoint = job.directory / CHECKPOINT
        resume = resume and holds_run(job.directory)
        if resume and checkpoint.exists():
            simulation.load(checkpoint)
        self._clock = simulation.compute_seconds
        yield from carry_out(job, simulation, checkpoint, resume=resume)

    def _simulation(self, job: Job) -> Simulation | AsynchronousSimulation:
        engine = self._made[1] if self._made is not None and self._made[0] == job.task else None
        task = job.task.make() if engine is None else engine.task
        plan, settings, clock = job.plan, job.settings, self._clock
        simulation: Simulation | AsynchronousSimulation
        if settings.asynchronous:
            simulation = AsynchronousSimulation(
                task, plan, settings, engine=engine, compute_seconds=clock
            )
        else:
            simulation = Simulation(
                task, plan, settings, events=job.events, engine=engine, compute_seconds=clock
            )
        self._made = (job.task, simulation.engine)
        return simulation


def _recorded(job: Job) -> float | None:
    """The seconds of a gradient in a run that was started before, in step."""
    if not holds_run(job.directory) or job.settings.asynchronous:
        return None
    records = read_run(job.directory).records
    first = records[0] if records else None
    if first is None or first.compute_seconds is None or not first.iteration:
        return None
    slowness = [1 / speed for speed in job.settings.delays.speeds]  # its seconds are a mean
    return first.compute_seconds / first.iteration / statistics.fmean(slowness or [1.0])
