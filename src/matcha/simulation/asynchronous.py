"""Asynchronous training, simulated: every worker steps at its own speed and meets when it can.

The same rules as `Gossip(..., asynchronous=True)`: a gradient is taken at the values that a worker
has when its step begins and applied when the step ends; a meeting takes both ends' values when it
begins and adds ±w(x_j − x_i) when it ends. So the mean over workers moves by gradients alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from matcha.errors import InputError
from matcha.plans import PlanLike
from matcha.records import Record
from matcha.simulation.engine import Engine
from matcha.simulation.mixing import is_whole
from matcha.simulation.pace import Agenda, Happening, compute_times, link_seconds
from matcha.simulation.run import Simulation, seeded
from matcha.topology import Link
from matcha.training.settings import Settings
from matcha.training.task import Task


class AsynchronousSimulation(Simulation):
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

    _schema = "matcha.asynchronous-checkpoint/1"

    def __init__(
        self,
        task: Task,
        plan: PlanLike,
        settings: Settings,
        *,
        engine: Engine | None = None,
        compute_time: float | None = None,
    ) -> None:
        super().__init__(task, plan, settings, engine=engine, compute_time=compute_time)
        self._check_pace()
        self.agenda = self._new_agenda()
        rows, m = self.engine.workers.parameters, task.num_workers
        self._memories = [settings.optimizer.state(rows[i : i + 1]) for i in range(m)]
        self._tables: dict[int, dict[str, Tensor]] = {}
        self._taken: dict[Link, Tensor] = {}
        self._rates = [0.0] * m
        self._meetings = 0.0

    def _check_pace(self) -> None:
        problem = None
        if not all(level.process.has_meetings for level in self.plan.levels):
            problem = "workers meet in pairs: choose a plan of pairs, with both ways on every link"
        elif not is_whole(self.plan.wire):
            problem = "messages hold whole values: choose the wire float32"
        elif self.momentum.kind != "local":
            problem = "a worker's momentum is its own: leave momentum at 'local'"
        elif self.settings.clip is not None:
            problem = "meetings are not clipped: leave clip out"
        elif self.plan.worker_weights is not None:
            problem = "a worker's own pace weighs it: plan without worker_weights"
        if problem is not None:
            raise InputError(f"asynchronously {problem}.")

    def _new_agenda(self) -> Agenda:
        delays = self.settings.delays
        compute = compute_times(delays, self.compute_time, self.task.num_workers)
        return Agenda(self.plan, compute, link_seconds(self.plan, delays))

    @property
    def iteration(self) -> int:
        """Finished iterations of a worker, on average."""
        return sum(self.agenda.iterations) // self.task.num_workers

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to train."""
        epochs, progress = self.iteration // self.task.steps_per_epoch, self.progress
        return self.settings.is_over(epochs, progress.worker_loss, progress.train_losses)

    def _advance(self) -> Record:
        """Up to the next moment on the grid of records."""
        m, steps, progress = self.task.num_workers, self.task.steps_per_epoch, self.progress
        if not progress.epoch:
            for worker in range(m):
                self._compute(worker)
        self.engine.losses.zero_()
        before = sum(self.agenda.iterations)
        progress.epoch += 1
        end = progress.epoch * steps * self.compute_time
        while self.agenda.next_time <= end * (1 + 1e-12):
            self._happen(self.agenda.next())
        done = sum(self.agenda.iterations)
        progress.worker_loss = float(self.engine.losses.sum()) / max(1, done - before)
        found = self._evaluated(self.is_over or self.settings.is_due(progress.epoch))
        return Record(
            iteration=self.iteration,
            epoch=done / m / steps,
            **found,
            worker_loss=progress.worker_loss,
            consensus_distance=self.engine.workers.consensus_distance(),
            learning_rate=max(self._rates),
            comm_units=2 * progress.comm_units / m,
            megabytes_sent=2 * self._meetings / m * self.engine.message_bytes / 1e6,
            time=end,
            compute_seconds=steps * self.compute_time,
            comm_seconds=0.0,
        )

    def _happen(self, now: Happening) -> None:
        x = self.engine.workers.parameters
        if now.what == "step":
            (worker,) = now.workers
            x[worker].sub_(self._rates[worker] * self.engine.workers.updates[worker])
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
            current = {k // self.task.steps_per_epoch for k in self.agenda.iterations}
            self._tables = {e: table for e, table in self._tables.items() if e in current}
            self._tables[epoch] = {
                name: torch.from_numpy(table).to(self.engine.device)
                for name, table in self.task.tables(epoch).items()
            }
        return self._tables[epoch]

    def _own_state(self) -> dict[str, Any]:
        return {
            "meetings": self._meetings,
            "rates": self._rates,
            "agenda": self.agenda.state(),
            "taken": dict(self._taken),
            "memories": self._memories,
            "carried": self.engine.carried,
            "updates": self.engine.workers.updates,
        }

    def _load_own_state(self, document: dict[str, Any]) -> None:
        self.agenda = self._new_agenda()
        self.agenda.load(document["agenda"])
        self.engine.workers.updates.copy_(document["updates"])
        device = self.engine.device
        self._taken = {link: taken.to(device) for link, taken in document["taken"].items()}
        for memory, saved in zip(self._memories, document["memories"], strict=True):
            for name, tensor in memory.items():
                tensor.copy_(saved[name])
        for carried, saved in zip(self.engine.carried, document["carried"], strict=True):
            for tensor, value in zip(carried, saved, strict=True):
                tensor.copy_(value)
        self._rates, self._meetings = list(document["rates"]), document["meetings"]
