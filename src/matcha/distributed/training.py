"""Training one worker's part of a built-in task, with records on every rank."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from matcha.distributed.collectives import gather
from matcha.distributed.gossip import Gossip
from matcha.distributed.transports.slow_links import SlowLinks
from matcha.distributed.transports.transport import Transport
from matcha.errors import InputError
from matcha.plans import AnyPlan
from matcha.records import Record, RunHeader, RunWriter, Span

__all__ = ["Training", "WorkerTask", "train_task"]


class Score(Protocol):
    """What an evaluation gives."""

    @property
    def loss(self) -> float: ...
    @property
    def accuracy(self) -> float | None: ...


class WorkerTask(Protocol):
    """Data, model and loss of m workers; `matcha.experiments` has some."""

    name: str
    seed: int
    num_workers: int
    steps_per_epoch: int

    def model(self) -> nn.Module: ...  # noqa: D102
    def to(self, device: torch.device, dtype: torch.dtype) -> None: ...  # noqa: D102
    def tables(self, epoch: int) -> dict[str, npt.NDArray[np.generic]]: ...  # noqa: D102
    def batch(self, rows: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]: ...  # noqa: D102
    def initial_state(self) -> tuple[Tensor, ...]: ...  # noqa: D102
    def loss(  # noqa: D102
        self, model: nn.Module, inputs: Tensor, targets: Tensor, state: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]: ...
    def evaluate(self, model: nn.Module) -> Score: ...  # noqa: D102


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How to train; what is trained is the task's, who talks when is the plan's."""

    epochs: int
    rate: Callable[[float, Sequence[float]], float]
    """The learning rate at a fractional epoch, given the evaluation loss of each finished one."""
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    clip_norm: float | None = None
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    evaluate_every: int = 1
    """Epochs between evaluations of the average model; the last epoch is always evaluated."""
    target_loss: float | None = None
    """Stop after the epoch in which the mean training loss reaches this."""
    directory: Path | None = None
    """Where records go; None keeps none."""
    name: str = "training"
    config: Mapping[str, Any] | None = None
    """What the run's header says about its making."""
    resume: bool = False
    """Continue from the newest checkpoint in `directory`."""
    checkpoint_every: int = 0
    """Epochs between checkpoints; 0 writes none."""
    traced_iterations: int = 40
    """How many iterations leave spans for the timeline."""
    tensorboard: bool = False
    gossip: Mapping[str, Any] | None = None
    """Further arguments of `Gossip`."""

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.evaluate_every < 1:
            raise InputError("epochs and evaluate_every must be 1 or more.")
        if self.directory is None and (self.resume or self.checkpoint_every):
            raise InputError("checkpoints need a directory.")


def train_task(
    task: WorkerTask,
    plan: AnyPlan,
    training: Training,
    transport: Transport,
    on_record: Callable[[Record], None] | None = None,
) -> list[Record]:
    """Train this worker's part of a task and return the records over all workers.

    Every rank returns the same records and writes its own; rank 0 writes the run's. The clock
    stands still while the average model is evaluated and while checkpoints are written.

    Args:
        task: for as many workers as the plan has.
        plan: who talks when.
        training: how to train.
        transport: how messages travel.
        on_record: called with each record over all workers, for progress.
    """
    if task.num_workers != plan.num_workers:
        raise InputError(
            f"the plan is for {plan.num_workers} workers and the task for {task.num_workers}."
        )
    return _Worker(task, plan, training, transport, on_record).run()


class _Worker:
    def __init__(
        self,
        task: WorkerTask,
        plan: AnyPlan,
        training: Training,
        transport: Transport,
        on_record: Callable[[Record], None] | None,
    ) -> None:
        self.task, self.plan, self.training = task, plan, training
        self.on_record = on_record
        self.device = torch.device(training.device)
        task.to(self.device, training.dtype)
        self.model = task.model().to(self.device, training.dtype)
        self.optimizer = training.optimizer(self.model.parameters())
        self.spans: list[Span] = []
        options = {**(training.gossip or {}), "transport": transport}
        self.gossip = Gossip(self.model, self.optimizer, plan, on_span=self._trace, **options)
        self.rank = self.gossip.rank
        self.records: list[Record] = []
        self.losses: list[float] = []
        self.units = self.seconds = 0.0
        self.first_epoch = self._resume() if training.resume else 0
        self.writer = self._open()
        self.board = _board(training) if training.tensorboard and self.rank == 0 else None

    def run(self) -> list[Record]:
        try:
            for epoch in range(self.first_epoch, self.training.epochs):
                trained = self._train(epoch)
                with self._off_the_clock():
                    record = self._finish(epoch, *trained)
                if self._is_last(record):
                    break
            with self._off_the_clock():
                self._write_spans()
                self.gossip.detach()
        finally:
            if self.writer is not None:
                self.writer.close()
            if self.board is not None:
                self.board.close()
        return self.records

    def _off_the_clock(self) -> AbstractContextManager[None]:
        """What the run's clock does not count, an emulated link does not slow down."""
        transport = self.gossip.transport
        return transport.at_full_speed() if isinstance(transport, SlowLinks) else nullcontext()

    # -- one epoch --------------------------------------------------------------------------------

    def _train(self, epoch: int) -> tuple[float, float, float, float]:
        """One epoch; returns this worker's mean loss, its last rate, and where its time went."""
        task, model, optimizer = self.task, self.model, self.optimizer
        tables = {n: torch.from_numpy(t).to(self.device) for n, t in task.tables(epoch).items()}
        state = tuple(tensor.to(self.device) for tensor in task.initial_state())
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        rate = 0.0
        model.train()
        exchanged, started = self.gossip.exchange_seconds, time.perf_counter()
        self.gossip.restart_clock()
        rounds = self.plan.rounds(self.gossip.iteration)
        for k in range(task.steps_per_epoch):
            rate = self.training.rate(epoch + k / task.steps_per_epoch, self.losses)
            for group in optimizer.param_groups:
                group["lr"] = rate
            # Of all workers' rows this one takes its own: a row's place is its worker's number.
            inputs, targets = task.batch({name: table[k] for name, table in tables.items()})
            loss, state = task.loss(model, inputs[self.rank], targets[self.rank], state)
            state = tuple(tensor.detach() for tensor in state)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            if self.training.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), self.training.clip_norm)
            optimizer.step()
            total += loss.detach()
            self.units += self.plan.round_time(next(rounds))
        self.gossip.settle()
        elapsed = time.perf_counter() - started
        self.seconds += elapsed
        comm = self.gossip.exchange_seconds - exchanged
        return float(total) / task.steps_per_epoch, rate, elapsed, comm

    def _finish(self, epoch: int, loss: float, rate: float, elapsed: float, comm: float) -> Record:
        """The epoch's records, one of this worker's and one over all."""
        done = epoch + 1
        compute = elapsed if self.gossip.overlaps else max(0.0, elapsed - comm)
        mine = Record(
            iteration=self.gossip.iteration,
            epoch=float(done),
            worker=self.rank,
            train_loss=loss,
            learning_rate=rate,
            comm_units=self.units,
            time=self.seconds,
            compute_seconds=compute,
            comm_seconds=comm,
        )
        answers = gather(
            self.gossip.transport,
            json.dumps([loss, self.seconds, compute, comm]).encode(),
            self.gossip.deadline,
        )
        table = np.array([json.loads(answer) for answer in answers])
        record = self._overall(mine, table, evaluate=self._is_due(done))
        self.losses.append(record.test_loss if record.test_loss is not None else loss)
        self.records.append(record)
        if self.writer is not None:
            self.writer.record(mine)
            if self.rank == 0:
                self.writer.record(record)
        if self.board is not None:
            _to_board(self.board, record)
        if self.on_record is not None:
            self.on_record(record)
        self._checkpoint(done)
        return record

    def _overall(self, mine: Record, table: npt.NDArray[np.float64], evaluate: bool) -> Record:
        loss, _, compute, comm = (float(column) for column in table.mean(0))
        score = self._evaluate() if evaluate and math.isfinite(loss) else None
        return Record(
            iteration=mine.iteration,
            epoch=mine.epoch,
            train_loss=loss,
            test_loss=score.loss if score else None,
            test_accuracy=score.accuracy if score else None,
            consensus_distance=self.gossip.consensus_distance() if math.isfinite(loss) else None,
            learning_rate=mine.learning_rate,
            comm_units=mine.comm_units,
            time=float(table[:, 1].max()),  # the run is as far as its slowest worker
            compute_seconds=compute,
            comm_seconds=comm,
        )

    def _evaluate(self) -> Score:
        with self.gossip.averaged() as model, torch.no_grad():
            model.eval()
            try:
                return self.task.evaluate(model)
            finally:
                model.train()

    def _is_due(self, done: int) -> bool:
        return done % self.training.evaluate_every == 0 or done == self.training.epochs

    def _is_last(self, record: Record) -> bool:
        assert record.train_loss is not None
        target = self.training.target_loss
        reached = target is not None and record.train_loss <= target
        return reached or not math.isfinite(record.train_loss)

    # -- what stays -------------------------------------------------------------------------------

    def _open(self) -> RunWriter | None:
        training, plan = self.training, self.plan
        if training.directory is None:
            return None
        header = RunHeader(
            name=training.name,
            kind="training",
            task=self.task.name,
            strategy=plan.strategy,
            budget=plan.budget,
            seed=plan.seed,
            num_workers=plan.num_workers,
            clock="wall",
            config=dict(training.config or {}),
        )
        primary = self.rank == 0
        resume = training.resume
        return RunWriter(training.directory, header, plan, resume=resume, primary=primary)

    @property
    def _folder(self) -> Path:
        assert self.training.directory is not None
        return self.training.directory / "checkpoints"

    def _checkpoint(self, done: int) -> None:
        every = self.training.checkpoint_every
        if every and (done % every == 0 or done == self.training.epochs):
            extra = {
                "epoch": done,
                "losses": self.losses,
                "units": self.units,
                "seconds": self.seconds,
            }
            self.gossip.save(self._folder, extra=extra)

    def _resume(self) -> int:
        extra = self.gossip.load(self._folder)
        self.losses = list(extra["losses"])
        self.units, self.seconds = extra["units"], extra["seconds"]
        epoch: int = extra["epoch"]
        return epoch

    def _trace(self, span: Span) -> None:
        if span.iteration < self.training.traced_iterations:
            self.spans.append(span)

    def _write_spans(self) -> None:
        """Rank 0 writes everybody's spans, each on its own worker's clock from its first span."""
        lines = json.dumps([asdict(span) for span in self.spans]).encode()
        gathered = gather(self.gossip.transport, lines, self.gossip.deadline)
        if self.rank != 0 or self.writer is None:
            return
        for line in gathered:
            spans = [Span(**fields) for fields in json.loads(line)]
            origin = min((span.start for span in spans), default=0.0)
            for span in spans:
                moved = {"start": span.start - origin, "end": span.end - origin}
                self.writer.span(Span(**{**asdict(span), **moved}))


def _board(training: Training) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InputError("TensorBoard is not installed: pip install tensorboard.") from error
    if training.directory is None:
        raise InputError("TensorBoard needs a directory.")
    return SummaryWriter(str(training.directory / "tensorboard"))


def _to_board(board: Any, record: Record) -> None:
    for name in ("train_loss", "test_loss", "test_accuracy", "consensus_distance", "comm_units"):
        value = getattr(record, name)
        if value is not None:
            board.add_scalar(name, value, record.iteration)
