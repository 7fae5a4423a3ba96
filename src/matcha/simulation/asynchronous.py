"""Asynchronous training, simulated: every worker steps at its own speed and meets when it can.

The same rules as `Gossip(..., asynchronous=True)`: a gradient is taken at the values that a worker
has when its step begins and applied when the step ends; a meeting takes both ends' values when it
begins and adds ±w(x_j − x_i) when it ends. So the mean over workers moves by gradients alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from matcha._io import replace_file
from matcha.errors import InputError
from matcha.plans import PlanLike
from matcha.records import Record
from matcha.simulation.engine import Engine
from matcha.simulation.mixing import is_whole
from matcha.simulation.pace import Agenda, Happening, compute_times, link_seconds
from matcha.simulation.run import Simulation, read_checkpoint, seeded
from matcha.topology import Link
from matcha.training.jobs import Progress, identity
from matcha.training.settings import Settings
from matcha.training.task import Task

CHECKPOINT_SCHEMA = "matcha.asynchronous-checkpoint/1"


class AsynchronousSimulation:
    """m workers of their own speeds (`Delays.speeds`) that meet when both have time.

    Iterate over it for a record each time that a worker of speed 1 would have finished an epoch;
    it ends when the workers have finished as many epochs as the settings say, on average, so that
    as many gradients are computed as in step. A record's iteration and epoch are that average.

    Args:
        task: data, model and loss.
        plan: of pairs.
        settings: how to train; local momentum, whole messages.
        engine: as `Simulation`'s.
        compute_time: as `Simulation`'s.
    """

    def __init__(
        self,
        task: Task,
        plan: PlanLike,
        settings: Settings,
        *,
        engine: Engine | None = None,
        compute_time: float | None = None,
    ) -> None:
        self._in_step = Simulation(task, plan, settings, engine=engine, compute_time=compute_time)
        _check(plan, self._in_step)
        self.task, self.plan, self.settings = task, plan, settings
        self.engine = self._in_step.engine
        self._seconds = link_seconds(plan, settings.delays)
        compute = compute_times(settings.delays, self.compute_time, task.num_workers)
        self.agenda = Agenda(plan, compute, self._seconds)
        rows = self.engine.workers.parameters
        self._memories = [
            settings.optimizer.state(rows[i : i + 1]) for i in range(task.num_workers)
        ]
        self._tables: dict[int, dict[str, Tensor]] = {}
        self._taken: dict[Link, Tensor] = {}
        self._rates = [0.0] * task.num_workers
        self._steps = 0
        self._meetings = 0.0
        self._has_begun = False

    @property
    def progress(self) -> Progress:
        """How far it is: epochs are moments on the grid of records, units those of all workers."""
        return self._in_step.progress

    @property
    def compute_time(self) -> float:
        """Seconds of one gradient at speed 1."""
        return self._in_step.compute_time

    @property
    def iteration(self) -> int:
        """Finished iterations of a worker, on average."""
        return sum(self.agenda.iterations) // self.task.num_workers

    @property
    def threads(self) -> int | None:
        """As a simulation in step has it."""
        return self._in_step.threads

    def time_gradients(self) -> float:
        """Seconds of one gradient on this device."""
        return self._in_step.time_gradients()

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to train."""
        epochs = self.iteration // self.task.steps_per_epoch
        progress = self.progress
        return self.settings.is_over(epochs, progress.worker_loss, progress.train_losses)

    def __iter__(self) -> Iterator[Record]:
        while not self.is_over:
            yield self._advance()

    def _advance(self) -> Record:
        """Up to the next moment on the grid of records."""
        steps = self.task.steps_per_epoch
        if not self._has_begun:
            self._has_begun = True
            for worker in range(self.task.num_workers):
                self._compute(worker)
        self.engine.losses.zero_()
        self._steps = 0
        self.progress.epoch += 1
        end = self.progress.epoch * steps * self.compute_time
        while self.agenda.next_time <= end * (1 + 1e-12):
            self._happen(self.agenda.next())
        self.progress.worker_loss = float(self.engine.losses.sum()) / max(1, self._steps)
        return self._record(end)

    def _happen(self, now: Happening) -> None:
        x = self.engine.workers.parameters
        if now.what == "step":
            (worker,) = now.workers
            x[worker].sub_(self._rates[worker] * self.engine.workers.updates[worker])
            self._steps += 1
            self._compute(worker)
            return
        i, j = now.workers
        if now.what == "begin":
            self._taken[i, j] = x[j] - x[i]
            return
        move = self._taken.pop((i, j)).mul_(now.weight)
        x[i].add_(move)
        x[j].sub_(move)
        self._meetings += 1
        self.progress.comm_units += self.plan.timing.round_time((((i, j),),))

    def _compute(self, worker: int) -> None:
        """A worker's next direction, at what it holds now."""
        steps, k = self.task.steps_per_epoch, self.agenda.iterations[worker]
        rows = {name: table[k % steps] for name, table in self._table(k // steps).items()}
        self._rates[worker] = self.settings.schedule.rate(k / steps, self.progress.test_losses)
        with seeded(self.engine.device, self.task.seed, worker, k):
            self.engine.direct_one(worker, rows, self._memories[worker], is_first=k % steps == 0)

    def _table(self, epoch: int) -> dict[str, Tensor]:
        """An epoch's choices, kept while any worker is in that epoch."""
        if epoch not in self._tables:
            steps = self.task.steps_per_epoch
            current = {k // steps for k in self.agenda.iterations}
            self._tables = {e: table for e, table in self._tables.items() if e in current}
            self._tables[epoch] = {
                name: torch.from_numpy(table).to(self.engine.device)
                for name, table in self.task.tables(epoch).items()
            }
        return self._tables[epoch]

    def _record(self, time: float) -> Record:
        progress = self.progress
        due = self.is_over or self.settings.is_due(progress.epoch)
        result = self._in_step.evaluate() if due and not progress.diverged else None
        if result:
            progress.add(result)
        m = self.task.num_workers
        return Record(
            iteration=self.iteration,
            epoch=sum(self.agenda.iterations) / m / self.task.steps_per_epoch,
            **(result.fields() if result else {}),
            worker_loss=progress.worker_loss,
            consensus_distance=self.engine.workers.consensus_distance(),
            learning_rate=max(self._rates),
            comm_units=2 * progress.comm_units / m,
            megabytes_sent=2 * self._meetings / m * self.engine.message_bytes / 1e6,
            time=time,
            compute_seconds=self.task.steps_per_epoch * self.compute_time,
            comm_seconds=0.0,
        )

    # Checkpoints.

    def save(self, path: Path) -> None:
        """Write all that happens next depends on."""
        document = {
            "schema": CHECKPOINT_SCHEMA,
            "identity": identity(self.task, self.plan, self.settings),
            "progress": asdict(self.progress),
            "meetings": self._meetings,
            "rates": self._rates,
            "has_begun": self._has_begun,
            "compute_seconds": self.compute_time,
            "threads": torch.get_num_threads(),
            "agenda": self.agenda.state(),
            "taken": dict(self._taken),
            "memories": self._memories,
            "carried": self.engine.carried,
            "updates": self.engine.workers.updates,
            "state": self.engine.state(),
        }
        with replace_file(path) as partial:
            torch.save(document, partial)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint."""
        now = identity(self.task, self.plan, self.settings)
        document: dict[str, Any] = read_checkpoint(path, CHECKPOINT_SCHEMA, now)
        self._in_step.take_clock(document["compute_seconds"])
        self._in_step.threads = document.get("threads")
        compute = compute_times(self.settings.delays, self.compute_time, self.task.num_workers)
        self.agenda = Agenda(self.plan, compute, self._seconds)
        self.agenda.load(document["agenda"])
        self.engine.load_state(document["state"])
        self.engine.workers.updates.copy_(document["updates"])
        device = self.engine.device
        self._taken = {link: taken.to(device) for link, taken in document["taken"].items()}
        for memory, saved in zip(self._memories, document["memories"], strict=True):
            for name, tensor in memory.items():
                tensor.copy_(saved[name])
        for carried, saved in zip(self.engine.carried, document["carried"], strict=True):
            for tensor, value in zip(carried, saved, strict=True):
                tensor.copy_(value)
        self._in_step.progress = Progress.read(document.get("progress", document))  # flat in 0.2
        self._has_begun, self._rates = document["has_begun"], list(document["rates"])
        self._meetings = document["meetings"]


def _check(plan: PlanLike, simulation: Simulation) -> None:
    problem = None
    if not all(level.process.has_meetings for level in plan.levels):
        problem = "workers meet in pairs: choose a plan of pairs, with both ways on every link"
    elif not is_whole(simulation.plan.wire):
        problem = "messages hold whole values: choose the wire float32"
    elif simulation.momentum.kind != "local":
        problem = "a worker's momentum is its own: leave momentum at 'local'"
    elif simulation.settings.clip is not None:
        problem = "meetings are not clipped: leave clip out"
    elif plan.worker_weights is not None:
        problem = "a worker's own pace weighs it: plan without worker_weights"
    if problem is not None:
        raise InputError(f"asynchronously {problem}.")
