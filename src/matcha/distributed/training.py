"""Training: one real worker's part of a task, an epoch at a time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from matcha._io import fingerprint
from matcha.distributed.gossip import Gossip
from matcha.distributed.transports.base import Transport
from matcha.distributed.transports.collectives import agree, gather
from matcha.distributed.transports.slow_links import SlowLinks
from matcha.errors import InputError
from matcha.plans import PlanLike
from matcha.records import Entry, Record, Span
from matcha.training.evaluation import Score, finish_average, sample_losses, score
from matcha.training.progress import Progress, identity
from matcha.training.settings import Delays, Execution, Settings
from matcha.training.task import Task

__all__ = ["Training", "check_trainable"]


class Training:
    """One of m workers training by a plan, each a process of its own.

    Construction, iteration, saving and loading are collective: every worker does the same. Each
    epoch yields this worker's :class:`Record` and then the one over all workers, the same
    everywhere; in the end worker 0 yields all workers' spans. The clock stands still while the
    average model is evaluated and while checkpoints are written.

    Args:
        task: data, model and loss, for as many workers as the plan has.
        plan: who talks when.
        settings: how to train.
        transport: how messages travel.
        traced_iterations: how many iterations leave spans for the timeline.
        options: further arguments of `Gossip`.

    Raises:
        InputError: the settings are a simulation's, the task is for another number of workers, or
            the workers do not agree on task and settings.

    """

    def __init__(
        self,
        task: Task,
        plan: PlanLike,
        settings: Settings,
        transport: Transport,
        *,
        traced_iterations: int = 40,
        **options: Any,
    ) -> None:
        check_trainable(task, plan, settings)
        self.task, self.plan, self.settings = task, plan, settings
        self.traced_iterations = traced_iterations
        self.device = torch.device(settings.execution.device)
        task.to(self.device, settings.execution.compute_dtype)
        self.model = task.model().to(self.device, settings.execution.dtype)
        self.optimizer = settings.optimizer.for_model(self.model.parameters())
        self.spans: list[Span] = []
        self.identity = identity(task, plan, settings)
        self.gossip = Gossip(
            self.model,
            self.optimizer,
            plan,
            transport=transport,
            overlap=settings.overlap,
            momentum=settings.momentum,
            clip=settings.clip,
            on_span=self._trace,
            **options,
        )
        self.rank = self.gossip.rank
        self.progress = Progress()
        self._changes: list[list[int]] = []
        membership = self.gossip.membership
        self.came_late = membership is not None and membership.carry(
            lambda: asdict(self.progress), self._resume
        )
        if not self.came_late:
            facts = {part: fingerprint(self.identity[part])[:12] for part in ("task", "settings")}
            agree(transport, facts, self.gossip.state.timeout)

    @property
    def iteration(self) -> int:
        """Finished iterations."""
        return self.gossip.iteration

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to train."""
        return self.progress.is_over(self.settings)

    def __iter__(self) -> Iterator[Entry]:
        while not self.is_over:
            epoch = self.progress.epoch
            loss, rate, elapsed, comm = self._train()
            if (
                self.progress.epoch != epoch
            ):  # this worker was away, and goes on where the others are
                continue
            self.progress.epoch += 1
            mine = self._mine(loss, rate, elapsed, comm)
            with self._off_the_clock():
                record = self._overall(mine)
            yield from (mine, record)
        with self._off_the_clock():
            spans = self._gather_spans()
        yield from spans
        self.gossip.detach()

    def _off_the_clock(self) -> AbstractContextManager[None]:
        """What the run's clock does not count, an emulated link does not slow down."""
        transport = self.gossip.state.transport
        return transport.at_full_speed() if isinstance(transport, SlowLinks) else nullcontext()

    # -- one epoch --------------------------------------------------------------------------------

    def _train(self) -> tuple[float | None, float, float, float]:
        """One epoch; returns this worker's mean loss, its last rate, and where its time went."""
        task, steps = self.task, self.task.steps_per_epoch
        tables = task.tables(self.progress.epoch)
        choices = {name: torch.from_numpy(t).to(self.device) for name, t in tables.items()}
        state = tuple(tensor.to(self.device) for tensor in task.initial_state())
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        rate = 0.0
        self.model.train()
        exchanged, started = self.gossip.state.stopwatch.exchange_seconds, time.perf_counter()
        sent = self.gossip.state.exchange.bytes_sent
        self.gossip.state.stopwatch.restart()
        done, epoch = 0, self.progress.epoch
        # By the plan's count, not by a loop's own: a worker that is back starts midway.
        while (k := self.gossip.iteration - epoch * steps) < steps and self.progress.epoch == epoch:
            rate = self._set_rate(epoch + k / steps)
            # Of all workers' rows this one takes its own: a row's place is its worker's number.
            inputs, targets = task.batch({name: table[k] for name, table in choices.items()})
            with self.settings.execution.autocast():
                loss, state = task.loss(self.model, inputs[self.rank], targets[self.rank], state)
            state = tuple(tensor.detach() for tensor in state)
            units = self.plan.round_time(self.gossip.state.cursor.round)
            self._step(loss)
            total += loss.detach()
            done += 1
            if self.gossip.iteration == epoch * steps + k + 1:  # or it took a neighbour's state
                self.progress.comm_units += units
        self.gossip.state.settle()
        elapsed = time.perf_counter() - started
        self.progress.seconds += elapsed
        self.progress.megabytes += (self.gossip.state.exchange.bytes_sent - sent) / 1e6
        comm = self.gossip.state.stopwatch.exchange_seconds - exchanged
        return float(total) / done if done else None, rate, elapsed, comm

    def _set_rate(self, epoch: float) -> float:
        rate = self.settings.schedule.rate(epoch, self.progress.test_losses)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _step(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        limit = self.settings.optimizer.clip_norm
        if limit is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.optimizer.step()

    # -- what is known after it -------------------------------------------------------------------

    def _mine(self, loss: float | None, rate: float, elapsed: float, comm: float) -> Record:
        """This worker's record of the epoch."""
        return Record(
            iteration=self.iteration,
            epoch=float(self.progress.epoch),
            worker=self.rank,
            worker_loss=loss,
            learning_rate=rate,
            comm_units=self.progress.comm_units,
            megabytes_sent=self.progress.megabytes,
            time=self.progress.seconds,
            compute_seconds=elapsed if self.gossip.state.overlaps else max(0.0, elapsed - comm),
            comm_seconds=comm,
        )

    def _overall(self, mine: Record) -> Record:
        """The record over all workers, the same bits on each."""
        trained = mine.worker_loss is not None  # not if it came back at the epoch's very end
        told = (mine.time, mine.compute_seconds, mine.comm_seconds, mine.megabytes_sent)
        table = self._shared([trained, mine.worker_loss or 0.0, *told])
        who = table[:, 0] > 0
        _, loss, _, compute, comm, sent = map(float, table[who if who.any() else ...].mean(0))
        self.progress.worker_loss = loss
        finite = not self.progress.diverged
        due = self.settings.is_due(self.progress.epoch)
        found = self._evaluate() if finite and due else None
        if found is not None:
            self.progress.add(found)
        return replace(
            mine,
            worker=None,
            worker_loss=loss,
            **(found.fields() if found else {}),
            consensus_distance=self.gossip.consensus_distance() if finite else None,
            megabytes_sent=sent,
            time=float(table[:, 2].max()),  # the run is as far as its slowest worker
            compute_seconds=compute,
            comm_seconds=comm,
            members=len(table),
            changes=self._new_changes(),
        )

    def _new_changes(self) -> list[list[int]] | None:
        membership = self.gossip.membership
        changes = [] if membership is None else membership.changes()
        found = [change for change in changes if change not in self._changes]
        self._changes += found
        return sorted(found) or None

    def _evaluate(self) -> Score:
        """The average model on training data, each worker on its share, and on held-out data.

        All evaluate the latter, as waiting for one would take as long; but their processors may
        round differently, and learning rates that follow the loss must not part: what worker 0
        finds counts.
        """
        model = finish_average(self.gossip.averaged_model(), self.task, self.settings)
        own = sample_losses(model, self.task, self.settings, workers=[self.rank])
        batches = [loss for losses in self._gather(own) for loss in losses]
        found = score(model, self.task, self.settings, batches)
        answer = self._gather([found.train_loss, found.test.loss, found.test.accuracy])[0]
        test = replace(found.test, loss=answer[1], accuracy=answer[2])
        return replace(found, train_loss=answer[0], test=test)

    def _shared(self, values: list[float | None]) -> npt.NDArray[np.float64]:
        return np.array(self._gather(values), dtype=np.float64)

    def _gather(self, value: Any) -> list[Any]:
        """Every worker's plain value, on every worker."""
        answers = gather(
            self.gossip.state.transport, json.dumps(value).encode(), self.gossip.state.timeout
        )
        return [json.loads(answer) for answer in answers]

    def _trace(self, span: Span) -> None:
        if span.iteration < self.traced_iterations:
            self.spans.append(span)

    def _gather_spans(self) -> list[Span]:
        """Gather all workers' spans on worker 0, each on its worker's clock from its first span."""
        gathered = self._gather([asdict(span) for span in self.spans])
        found = []
        for documents in gathered if self.rank == 0 else []:
            spans = [Span(**fields) for fields in documents]
            origin = min((span.start for span in spans), default=0.0)
            found += [replace(s, start=s.start - origin, end=s.end - origin) for s in spans]
        return found

    # -- checkpoints ------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write a checkpoint of all workers into a folder. Collective."""
        with self._off_the_clock():
            self.gossip.save(
                path,
                extra=asdict(self.progress),
                generators=self._generators(),
                identity=self.identity,
            )

    def load(self, path: Path) -> None:
        """Continue from the newest checkpoint in a folder, to the same bits. Collective.

        Raises:
            DataError: there is none, or it is damaged.
            InputError: it is of another plan, task or settings.
        """
        with self._off_the_clock():
            extra = self.gossip.load(path, generators=self._generators(), identity=self.identity)
        self._resume(extra)

    def _resume(self, progress: dict[str, Any]) -> None:
        self.progress = Progress.read(progress)

    def _generators(self) -> dict[str, torch.Generator]:
        """What dropout draws from."""
        if self.device.type == "cuda":
            return {"torch": torch.cuda.default_generators[self.device.index or 0]}
        return {"torch": torch.default_generator}


def check_trainable(task: Task, plan: PlanLike, settings: Settings) -> None:
    """Refuse a task for another number of workers, and settings that only a simulation has.

    Raises:
        InputError: says what does not fit.
    """
    if task.num_workers != plan.num_workers:
        raise InputError(
            f"the plan is for {plan.num_workers} workers and the task for {task.num_workers}."
        )
    if settings.asynchronous:
        raise InputError(
            "workers that meet asynchronously have no epochs together: give asynchronous=True to "
            "Gossip, in a loop of your own."
        )
    execution = settings.execution
    usual = Execution(device=execution.device, precision=execution.precision)
    if execution != usual or settings.delays != Delays():
        raise InputError(
            "delays, batching, streams, capture and compile are choices of a simulation: real "
            "workers have a clock and a device each, so leave them out."
        )
