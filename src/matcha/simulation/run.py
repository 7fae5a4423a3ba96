"""One simulated run: a task trained by a plan, one record per epoch."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from matcha._io import replace_file
from matcha.errors import InputError
from matcha.plans import Events, PlanLike
from matcha.records import Record
from matcha.rounds import Round
from matcha.simulation.engine import Engine
from matcha.simulation.flat import mean_squared_deviation
from matcha.simulation.forecast import Forecast
from matcha.simulation.mixing import is_whole
from matcha.simulation.pace import LinkClock, compute_times, link_seconds
from matcha.strategies import with_events
from matcha.training.differing import correction, data_differ
from matcha.training.evaluation import (
    Score,
    divergence,
    finish_average,
    function_distance,
    outputs,
    score,
)
from matcha.training.jobs import Progress, check_identity, check_schema, identity
from matcha.training.momentum import Momentum, parse_momentum, resolve_momentum
from matcha.training.optimizers import SGD
from matcha.training.rates import Constant
from matcha.training.settings import Settings
from matcha.training.task import KnownGradient, Task, dealt, generator
from matcha.wires import TopK


class Simulation:
    """m workers training on one device by a plan.

    Args:
        task: data, model and loss.
        plan: who talks when.
        settings: how to train.
        events: what happens by iteration. The row of a worker that is not there stands still,
            counts in no average, and takes another's state when the worker comes; one that joins
            starts from the average model.
        engine: one made for the same task, optimizer, overlap and execution, to start again;
            capturing graphs takes seconds, which a series of runs need spend only once.
        compute_time: of one gradient, where the settings leave it open; runs that are to be
            compared share one. None measures it here, apart from the training.

    Iterate over it for one :class:`Record` an epoch; between records, :attr:`engine` holds the
    workers' state. A run that diverges ends with that record.
    """

    _schema = "matcha.simulation-checkpoint/1"

    def __init__(
        self,
        task: Task,
        plan: PlanLike,
        settings: Settings,
        *,
        events: Events | None = None,
        engine: Engine | None = None,
        compute_time: float | None = None,
    ) -> None:
        self.events = events or Events()
        plan = with_events(plan, self.events)
        self.events.check(plan)
        self._whole, task = task, dealt(task, plan)
        self.task, self.plan, self.settings = task, plan, settings
        if engine is None:
            engine = Engine(
                task, settings.optimizer, overlap=settings.overlap, execution=settings.execution
            )
        else:
            theirs = (engine.task, engine.optimizer, engine.overlap, engine.execution)
            if theirs != (task, settings.optimizer, settings.overlap, settings.execution):
                raise InputError("the engine was made for another task or for other settings")
        self.momentum = _settle_momentum(task, plan, settings, self.events)
        _check(plan, settings, self.momentum, self.events)
        engine.equip(plan, self.momentum, settings.clip)
        engine.reset()
        self.engine = engine
        self.progress = Progress()
        self._gradient_sum = 0.0
        self._before: Tensor | None = None
        self._forecast = Forecast(momentum=settings.optimizer.momentum)
        self._clock: LinkClock | None = None
        self.threads: int | None = None
        """How many a loaded run had: others would differ in the last bits."""
        if settings.delays.speeds:
            compute_times(settings.delays, 0.0, task.num_workers)  # refuses too few
        given = settings.delays.compute_time
        self._compute_time = compute_time if given is None else given

    @property
    def iteration(self) -> int:
        """Finished iterations."""
        return self.progress.epoch * self.task.steps_per_epoch

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to train."""
        return self.progress.is_over(self.settings)

    @property
    def compute_time(self) -> float:
        """Seconds of one worker's gradient on the simulated clock, measured at first use."""
        if self._compute_time is None:
            self._compute_time = self.time_gradients()
        return self._compute_time

    def __iter__(self) -> Iterator[Record]:
        while not self.is_over:
            yield self._advance()

    def average(self) -> nn.Module:
        """The average model, its BatchNorm statistics as the settings say."""
        return finish_average(self.engine.workers.average(), self._whole, self.settings)

    def evaluate(self) -> Score:
        """The average model on training and held-out data."""
        return score(self.average(), self._whole, self.settings)

    def _evaluated(self, due: bool) -> dict[str, Any]:
        """What a record says of the average model, which is evaluated where it is due."""
        if not due or self.progress.diverged:
            return {}
        found = self.evaluate()
        self.progress.add(found)
        return found.fields()

    def _advance(self) -> Record:
        """One epoch."""
        task, plan, steps = self.task, self.plan, self.task.steps_per_epoch
        progress = self.progress
        compute = steps * self.compute_time
        first = self.iteration
        gone = self.events.gone(first + steps - 1)
        present = [worker for worker in range(task.num_workers) if worker not in gone]
        rounds = [self.events.round(plan, first + k) for k in range(steps)]
        schedule, losses = self.settings.schedule, progress.test_losses
        rates = [schedule.rate(progress.epoch + k / steps, losses) for k in range(steps)]
        # Dropout is all that draws from torch's own generator: an epoch's draws depend on the
        # epoch alone, and the caller's generator is left as it was.
        with seeded(self.engine.device, task.seed, progress.epoch):
            self.engine.begin_epoch(progress.epoch, rates, rounds)
            self._steps(steps)
            own_loss = float((self.engine.losses.cpu() / steps)[present].mean())
        units = self.momentum.messages * sum(
            self.events.round_time(plan, round, first + k) for k, round in enumerate(rounds)
        )
        comm = self.settings.delays.of(units, plan.timing.unit)
        if self.settings.delays.speeds:
            compute, comm = self._pass(rounds)
        progress.epoch += 1
        progress.comm_units += units
        progress.megabytes += sum(map(self._messages, rounds)) * self.engine.message_bytes / 1e6
        progress.seconds += compute + comm
        progress.worker_loss = own_loss
        self.engine.park(present)
        found = self._evaluated(self.settings.is_due(progress.epoch))
        known = isinstance(task, KnownGradient)
        return Record(
            iteration=self.iteration,
            epoch=float(progress.epoch),
            **found,
            worker_loss=own_loss,
            consensus_distance=self.engine.workers.consensus_distance()
            * task.num_workers
            / len(present),
            function_distance=self._function_distance(present) if found else None,
            predicted_consensus=self._predicted(rates),
            learning_rate=rates[-1],
            gradient_norm=self._gradient_sum / self.iteration if known else None,
            gradient_bound=self._gradient_bound(rates[-1]),
            comm_units=progress.comm_units,
            megabytes_sent=progress.megabytes,
            time=progress.seconds,
            compute_seconds=compute,
            comm_seconds=comm,
            members=len(present) if self.events.takes_workers else None,
            changes=self.events.changes(first, first + steps) or None,
        )

    def _function_distance(self, present: Sequence[int]) -> float | None:
        """How far apart the workers' own answers to a fixed batch are, where there are classes."""
        workers, found = self.engine.workers, []
        workers.refresh()
        for worker in present:
            module = workers.modules[worker]
            found.append(outputs(module, self._whole, self.settings))
            module.train()
        answers = torch.stack([each for each in found if each is not None] or [torch.zeros(0)])
        if not answers.numel():
            return None
        mean = answers.mean(0)
        return function_distance([divergence(own, mean) for own in answers])

    def _pass(self, rounds: Sequence[Round]) -> tuple[float, float]:
        """Seconds of computing, on average, and of all else, where workers have their speeds."""
        if self._clock is None:
            self._clock = self._new_clock()
        before = max(self._clock.times)
        for round in rounds:
            average = self.plan.round_time(round) if round.is_all_reduce else 0.0
            self._clock.iterate(round, self.settings.delays.of(average, self.plan.timing.unit))
        compute = len(rounds) * statistics.fmean(self._clock.compute)
        return compute, max(self._clock.times) - before - compute

    def _new_clock(self) -> LinkClock:
        delays = self.settings.delays
        compute = compute_times(delays, self.compute_time, self.task.num_workers)
        beside = self.settings.overlap
        return LinkClock(compute, link_seconds(self.plan, delays), beside=beside)

    def _messages(self, round: Round) -> float:
        """What a worker sends in a round, in the mean over workers and in messages of a meeting."""
        m = self.task.num_workers
        if round.is_all_reduce and round:
            if self.plan.timing.is_gathered:
                return m - 1  # each worker's message goes once around
            return 2 * (m - 1) / m  # parts of 1/m go twice around a ring
        return (1 if round.is_one_way else 2) * len(round.links) / m

    def time_gradients(self) -> float:
        """Seconds of one gradient on this device, after a warm-up; the state is left as it was."""
        assert self.progress.epoch == 0, "a run that was loaded brings its clock"
        steps = self.task.steps_per_epoch
        rounds = list(self.plan.rounds(0, steps))
        kept = self.engine.state()
        with seeded(self.engine.device, self.task.seed, 0):
            self.engine.begin_epoch(0, [0.0] * steps, rounds)
            seconds = self.engine.time_gradients()
        self.engine.load_state(kept)
        return seconds

    def _steps(self, steps: int) -> None:
        """Run an epoch's iterations, adding up ‖∇F(x̄)‖² before each where the task can say."""
        first = self.iteration
        for k in range(steps):
            for back in self.events.returns(first + k, self.plan.topology):
                self.engine.hand_over(back.donor, back.worker)
            joined, left = self.events.for_good(first + k)
            if joined or left:
                there = {*range(self.task.num_workers)} - self.events.gone(first + k - 1)
                self.engine.change_team(joined, left, there)
            new = self.events.new_connections(first + k, self.plan.topology)
            self.engine.mixing.forget(new)
            if isinstance(self.task, KnownGradient):
                self._gradient_sum += self.task.gradient_norm(self.engine.workers.average())
            self.engine.step(k)
            if k == steps - 2:  # the forecast asks how much a step is like the one before
                self._before = self.engine.directions().clone()

    def _gradient_bound(self, rate: float) -> float | None:
        """Theorem 2's bound on the average gradient norm so far; it is for plain SGD of eq. 2."""
        settings = self.settings
        is_plain = settings.optimizer == SGD() and not settings.overlap
        if not (isinstance(self.task, KnownGradient) and is_plain):
            return None
        if settings.schedule != Constant(base=rate):
            return None
        slowest = max(level.rho for level in self.plan.levels)
        return self.task.gradient_bound(slowest, self.iteration, rate)

    def _predicted(self, rates: Sequence[float]) -> float | None:
        """The consensus distance that the plan makes of the measured spread of the steps.

        Only where the forecast's model holds: SGD with local momentum, whole messages, and a plan
        with a steady state.
        """
        c = self.plan.level_at(self.iteration - 1).consensus_error
        m = self.task.num_workers
        is_local = self.momentum.kind == "local" and is_whole(self.plan.wire)
        if c is None or not is_local or not isinstance(self.settings.optimizer, SGD):
            return None
        last, before = self.engine.directions(), self._before
        spread = mean_squared_deviation(last)
        similarity = 0.0 if before is None else _similarity(last, before)
        return self._forecast.advance(rates, spread, similarity, c * m / max(m - 1, 1))

    # Checkpoints.

    def save(self, path: Path) -> None:
        """Write all that the next epoch depends on; a crash while writing leaves the old file."""
        document = {
            "schema": self._schema,
            "identity": identity(self.task, self.plan, self.settings),
            "progress": asdict(self.progress),
            "compute_seconds": self._compute_time,
            "threads": torch.get_num_threads(),
            "state": self.engine.state(),
        }
        with replace_file(path) as partial:
            torch.save(document | self._own_state(), partial)

    def _own_state(self) -> dict[str, Any]:
        """What the next epoch depends on beside the engine and the progress."""
        return {
            "gradient_sum": self._gradient_sum,
            "forecast": self._forecast.state(),
            "clock": None if self._clock is None else self._clock.times,
        }

    def load(self, path: Path) -> None:
        """Continue from a checkpoint; more epochs may be asked for than when it was written.

        Raises:
            InputError: The checkpoint is damaged, or belongs to another plan, task or settings.
        """
        try:
            document: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            found = document["schema"]
        except Exception as error:
            raise InputError(f"{str(path)!r} is not a readable checkpoint: {error}") from None
        check_schema(path, found, self._schema)
        now = identity(self.task, self.plan, self.settings)
        check_identity(path, document["identity"], now)
        self.engine.load_state(document["state"])
        self.progress = Progress.read(document.get("progress", document))  # flat in 0.2
        self._compute_time = document["compute_seconds"]
        self.threads = document.get("threads")
        self._load_own_state(document)

    def _load_own_state(self, document: dict[str, Any]) -> None:
        self._gradient_sum = document["gradient_sum"]
        self._forecast.load(document["forecast"])
        if document.get("clock") is not None:
            self._clock = self._new_clock()
            self._clock.times = list(document["clock"])


def _settle_momentum(task: Task, plan: PlanLike, settings: Settings, events: Events) -> Momentum:
    """How momentum and meetings go together; whether data differ decides what `auto` is."""
    momentum = resolve_momentum(settings.momentum, settings.optimizer, plan)
    if parse_momentum(settings.momentum) is not None or plan.outer is not None:
        return momentum
    goes_alone = any(level.needs_push_sum or level.mixing == "relay" for level in plan.levels)
    if goes_alone or isinstance(plan.wire, TopK):
        return Momentum()
    better = correction(settings)
    can_correct = better and not (plan.topology.directed or events.takes_workers)
    if better and can_correct and data_differ(task, settings.execution):
        return resolve_momentum(better, settings.optimizer, plan)
    return momentum


def _check(plan: PlanLike, settings: Settings, momentum: Momentum, events: Events) -> None:
    if momentum.kind == "exact-diffusion" and events.losses:
        raise InputError(
            "corrections of exact diffusion cancel only while all workers are there: leave "
            "the losses out, or use another momentum"
        )
    if isinstance(plan.wire, TopK) and (events.takes_workers or events.losses):
        raise InputError(
            "a top-k wire needs all workers in each average: leave the events out, or use "
            "another wire"
        )
    if plan.worker_weights is not None and not isinstance(settings.optimizer, SGD):
        raise InputError(
            "worker_weights multiply gradients, which Adam divides by their size: use SGD, or "
            "plan without worker_weights."
        )


def _similarity(last: Tensor, before: Tensor) -> float:
    """The correlation over workers of two steps, each as it deviates from the workers' mean."""
    a, b = last - last.mean(0), before - before.mean(0)
    size = float((a * a).sum() * (b * b).sum()) ** 0.5
    return float((a * b).sum()) / size if size > 0 else 0.0


@contextlib.contextmanager
def seeded(device: torch.device, *key: int) -> Iterator[None]:
    """What is drawn from torch's own generator inside depends on the key alone."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int(generator(*key).integers(2**63)))
        yield
