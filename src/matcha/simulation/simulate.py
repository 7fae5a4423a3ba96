"""Simulated runs of a task by one or several plans, in memory or in directories."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from matcha.errors import InputError
from matcha.plans import Events, PlanLike, check_plan
from matcha.records import Record, Run, arrival, has_diverged, holds_run, lowest_held, read_run
from matcha.simulation.asynchronous import AsynchronousSimulation
from matcha.simulation.engine import Engine
from matcha.simulation.pace import compute_times
from matcha.simulation.run import Simulation
from matcha.strategies import plan as make_plan
from matcha.topology import Topology
from matcha.training.jobs import Job, carry_out, check_free, make_jobs, with_asynchronous
from matcha.training.settings import Delays, Settings
from matcha.training.task import DealtTask, Task, TaskSpec, dealt
from matcha.zoo.recipes import Choices, recipe

CHECKPOINT = "checkpoint.pt"


def simulate(
    task: str | Task | TaskSpec,
    plans: PlanLike | Sequence[PlanLike],
    settings: Settings | None = None,
    *,
    output: str | Path | None = None,
    events: Events | None = None,
    resume: bool = False,
) -> list[Run]:
    """Train a task by one or several plans, all workers on one device.

    Args:
        task: a recipe's name, a task, or a recipe's `spec` with choices of your own.
        plans: who talks when.
        settings: how to train; None takes the recipe's, where the task is a recipe's name.
        output: a folder in which each run writes a directory; None keeps records in memory.
        events: workers lost and links cut, by iteration.
        resume: go on with runs that `output` holds and that were stopped.

    Returns:
        One run per plan, in their order, on one clock.

    Raises:
        InputError: plans, task and settings do not fit together, or a directory holds a run.

    >>> import matcha
    >>> from matcha.simulation import Constant, Settings
    >>> settings = Settings(epochs=2, schedule=Constant(base=0.05))
    >>> (run,) = matcha.simulate("logistic", matcha.plan(matcha.families.ring(4), 0.5), settings)
    >>> [record.epoch for record in run.records]
    [1.0, 2.0]
    """
    given = plans if isinstance(plans, Sequence) and not isinstance(plans, str) else [plans]
    several = [check_plan(plan) for plan in given]
    if not several:
        raise InputError("simulating needs at least one plan.")
    if isinstance(task, str):
        chosen = recipe(task)
        settings = settings or chosen.settings()
        spec = chosen.spec(Choices(num_workers=several[0].num_workers))
    else:
        if settings is None:
            raise InputError("settings may be left out for a recipe's name only: give Settings.")
        spec = task if isinstance(task, TaskSpec) else TaskSpec.of(task)
    folder = None if output is None else Path(output)
    return run_jobs(make_jobs(spec, several, settings, output=folder, events=events), resume=resume)


def run_jobs(
    jobs: Sequence[Job],
    *,
    asynchronous: bool = False,
    resume: bool = False,
    on_record: Callable[[Job, Record | None], None] | None = None,
) -> list[Run]:
    """Run simulated jobs one after another, on one clock.

    Args:
        jobs: the runs that are compared.
        asynchronous: beside each job whose workers meet in pairs, run the same asynchronously.
        resume: go on with runs that were stopped.
        on_record: called as each job starts, with None, and with each of its records.

    Raises:
        InputError: a job cannot start; no directory is left behind.
    """
    jobs = with_asynchronous(jobs) if asynchronous else list(jobs)
    check_free(jobs, resume=resume)
    for job in jobs:
        job.header()
        job.events.check(job.plan)
        compute_times(job.settings.delays, 1.0, job.plan.num_workers)
    runner = Runner(jobs if resume else ())
    runs = []
    for job in jobs:
        if on_record is not None:
            on_record(job, None)
        records = []
        for record in runner.run(job, resume=resume):
            records.append(record)
            if on_record is not None:
                on_record(job, record)
        if job.directory is None:
            runs.append(Run(header=job.header(), plan=job.plan, records=tuple(records)))
        else:
            runs.append(read_run(job.directory))
    return runs


class Runner:
    """Runs jobs one after another; jobs that differ only in their plan share an engine.

    All share one clock: the seconds per gradient are measured once, apart from any run, so that
    neither the order of the jobs nor what else the machine does favors one of them.

    Args:
        jobs: those that are compared; runs that are resumed bring their clock.
    """

    def __init__(self, jobs: Sequence[Job] = ()) -> None:
        self._made: tuple[TaskSpec, Engine] | None = None
        self._threads: int | None = None
        self._clock = next((c for job in jobs if (c := _recorded(job)) is not None), None)

    def run(self, job: Job, *, resume: bool = False) -> Iterator[Record]:
        """Train a job, one record per epoch; a run that was stopped goes on where it stopped."""
        simulation = self._simulation(job)
        self._made = (job.task, simulation.engine)
        checkpoint = job.directory and job.directory / CHECKPOINT
        resume = resume and job.directory is not None and holds_run(job.directory)
        if resume and checkpoint and checkpoint.exists():
            simulation.load(checkpoint)
        self._threads = simulation.threads or self._threads or quickest_threads(simulation)
        with on_threads(self._threads):
            self._clock = simulation.compute_time
            if checkpoint is None:
                yield from simulation
            else:
                yield from carry_out(job, simulation, checkpoint, resume=resume)

    def _simulation(self, job: Job) -> Simulation:
        plan, settings, clock = job.plan, job.settings, self._clock
        engine = self._made[1] if self._made and self._made[0] == job.task else None
        task = job.task.make() if engine is None else engine.task
        if isinstance(task, DealtTask):  # by another plan
            engine, task = None, task.whole
        elif dealt(task, plan) is not task:
            engine = None
        if settings.asynchronous:
            return AsynchronousSimulation(task, plan, settings, engine=engine, compute_time=clock)
        return Simulation(
            task, plan, settings, events=job.events, engine=engine, compute_time=clock
        )


def quickest_threads(simulation: Simulation) -> int:
    """How many threads of this process a task's gradients want: all, or one, by measuring once.

    Small networks are quicker on one. All must gain a tenth: a choice that hangs on the noise would
    give the same run other last bits. On a GPU, or with `OMP_NUM_THREADS`, they stay as they are.
    """
    present = torch.get_num_threads()
    if present == 1 or simulation.engine.on_cuda or "OMP_NUM_THREADS" in os.environ:
        return present
    seconds = {}
    for number in (present, 1):
        with on_threads(number):
            seconds[number] = simulation.time_gradients()
    return present if seconds[present] < 0.9 * seconds[1] else 1


@contextmanager
def on_threads(number: int) -> Iterator[None]:
    """So many threads for torch inside, and as many as before outside."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _recorded(job: Job) -> float | None:
    """The seconds per gradient in a run that was started before, in step."""
    if job.directory is None or not holds_run(job.directory) or job.settings.asynchronous:
        return None
    records = read_run(job.directory).records
    first = records[0] if records else None
    if first is None or first.compute_seconds is None or not first.iteration:
        return None
    slowness = [1 / speed for speed in job.settings.delays.speeds]  # its seconds are a mean
    return first.compute_seconds / first.iteration / statistics.fmean(slowness or [1.0])


class TaskTrials:
    """Trains a task by plan after plan, until the average model holds a target.

    Args:
        task: data, model and loss.
        topology: whose workers train.
        settings: how; `epochs` is how long exact averaging trains to find the target.
        target_loss: the average model's training loss; None takes what exact averaging holds after
            two thirds of its epochs.

    Raises:
        InputError: Exact averaging does not hold the target within its epochs.
    """

    def __init__(
        self,
        task: Task,
        topology: Topology,
        settings: Settings,
        *,
        target_loss: float | None = None,
    ) -> None:
        if target_loss is not None and not target_loss > 0:
            raise InputError(f"the target loss is {target_loss}, but it is above 0.")
        if target_loss is None and settings.epochs < 2:
            raise InputError(
                "a target is what exact averaging holds in two epochs: train for more, or give it."
            )
        self.task = task
        # The clock is not read: a trial counts iterations.
        clock = Delays(compute_time=0.0)
        self.settings = replace(settings, delays=clock, evaluate_every=1, target_loss=None)
        exact = Simulation(task, make_plan(topology, strategy="allreduce"), self.settings)
        self._engine = exact.engine
        self._threads = quickest_threads(exact)
        with on_threads(self._threads):
            losses = [loss for r in exact if (loss := r.train_loss) is not None]
        held = lowest_held(losses[: max(2, round(2 / 3 * len(losses)))])
        self.target = held if target_loss is None else target_loss
        found = None if self.target is None else arrival(losses, self.target)
        if self.target is None or found is None:
            raise InputError(
                f"exact averaging does not hold a training loss of {self.target} within "
                f"{settings.epochs} epochs: train for more, or raise the target."
            )
        self.exact_iterations = self._iterations(*found)

    def __call__(self, plan: PlanLike, limit: float, rate_factor: float = 1.0) -> float:
        """Iterations until the average model holds the target; infinite if not within a limit."""
        assert self.target is not None
        steps = self.task.steps_per_epoch
        epochs = math.ceil(limit / steps) + 1  # one more shows that the target is held
        schedule = self.settings.schedule.scaled(rate_factor)
        settings = replace(self.settings, epochs=epochs, target_loss=self.target, schedule=schedule)
        losses: list[float] = []
        with on_threads(self._threads):
            for record in Simulation(self.task, plan, settings, engine=self._engine):
                if record.train_loss is None or has_diverged(record.train_loss):
                    return math.inf
                losses.append(record.train_loss)
                if len(losses) * steps >= limit and losses[-1] > self.target:
                    return math.inf
        found = arrival(losses, self.target)
        needed = math.inf if found is None else self._iterations(*found)
        return needed if needed <= limit else math.inf

    def _iterations(self, place: int, share: float) -> float:
        """Iterations up to a place between two evaluations."""
        # Before the first evaluation there is none to draw a line from.
        return (place + share) * self.task.steps_per_epoch
