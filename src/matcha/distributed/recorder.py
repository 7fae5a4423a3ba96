"""Recorder: records, report, loggers and checkpoints for a training loop, one's own or a task's."""

from __future__ import annotations

import json
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from matcha.distributed.checkpoint import checkpoints, together
from matcha.distributed.gossip import Gossip
from matcha.distributed.transports.collectives import gather
from matcha.distributed.transports.emulation import SlowLinks
from matcha.errors import InputError
from matcha.records import Record, RunHeader, RunWriter, Span, arrival, holds_run
from matcha.training.jobs import Journal, Progress

if TYPE_CHECKING:
    from matcha.report.live import LivePage

__all__ = ["CHECKPOINTS", "Ledger", "Recorder"]

CHECKPOINTS = "checkpoints"
_METRICS = ("train_loss", "test_loss", "accuracy")
_TRACED = 40  # iterations


class Ledger:
    """What one worker, and then all, know at the end of an epoch: time, bytes, how far apart.

    The clock runs from `begin` to the end of the last step before `end`: what a script evaluates
    and saves in between does not count.
    """

    def __init__(self, gossip: Gossip) -> None:
        self.gossip, self.progress = gossip, Progress()
        self._state = gossip.state
        self._spans: list[Span] = []
        self._changes: list[list[int]] = []
        self._counted = gossip.iteration  # up to where `comm_units` counts
        self._state.stopwatch.listen(self._trace)
        self.begin()

    # -- one epoch --------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the clock."""
        self._exchanged = self._state.stopwatch.exchange_seconds
        self._sent = self._state.exchange.bytes_sent
        self._state.stopwatch.restart()
        self._started = self._state.stopwatch.free_since

    def end(self, loss: float | None, rate: float) -> Record:
        """Stop the clock: this worker's record of one epoch more."""
        state, progress, gossip = self._state, self.progress, self.gossip
        stepped, now = state.stopwatch.free_since, time.perf_counter()
        state.settle()
        elapsed = stepped - self._started + time.perf_counter() - now
        comm = state.stopwatch.exchange_seconds - self._exchanged
        rounds = islice(gossip.plan.rounds(self._counted), gossip.iteration - self._counted)
        progress.comm_units += sum(map(gossip.plan.round_time, rounds))
        progress.seconds += elapsed
        progress.megabytes += (state.exchange.bytes_sent - self._sent) / 1e6
        progress.epoch += 1
        self._counted = gossip.iteration
        return Record(
            iteration=gossip.iteration,
            epoch=float(progress.epoch),
            worker=gossip.rank,
            worker_loss=loss,
            learning_rate=rate,
            comm_units=progress.comm_units,
            megabytes_sent=progress.megabytes,
            time=progress.seconds,
            compute_seconds=elapsed if state.overlaps else max(0.0, elapsed - comm),
            comm_seconds=comm,
        )

    def overall(self, mine: Record, told: Mapping[str, float | None] | None = None) -> Record:
        """The record over all workers, the same bits on each. Collective.

        What is told are further fields of it; each is the mean over the workers that tell it.
        """
        gossip, membership = self.gossip, self.gossip.membership
        fields = (mine.worker_loss, mine.time, mine.compute_seconds, mine.comm_seconds)
        rows = self.gather([*fields, mine.megabytes_sent, dict(told or {})])
        trained = [row for row in rows if row[0] is not None]  # not if back at the epoch's very end
        table = np.array([row[:-1] for row in trained or rows], dtype=np.float64)
        loss, _, compute, comm, sent = map(float, table.mean(0))
        self.progress.worker_loss = loss if trained else None
        seen = [] if membership is None else membership.changes()
        changes = [change for change in seen if change not in self._changes]
        self._changes += changes
        return replace(
            mine,
            worker=None,
            worker_loss=self.progress.worker_loss,
            consensus_distance=None if self.progress.diverged else gossip.consensus_distance(),
            megabytes_sent=sent,
            time=max(float(row[1]) for row in rows),  # the run is as far as its slowest worker
            compute_seconds=compute,
            comm_seconds=comm,
            members=len(rows),
            changes=sorted(changes) or None,
            **_means([row[-1] for row in rows]),
        )

    # -- among workers ----------------------------------------------------------------------------

    def off_the_clock(self) -> AbstractContextManager[None]:
        """What the run's clock does not count, an emulated link does not slow down."""
        transport = self._state.transport
        return transport.at_full_speed() if isinstance(transport, SlowLinks) else nullcontext()

    def gather(self, value: Any) -> list[Any]:
        """Every worker's plain value, on every worker."""
        answers = gather(self._state.transport, json.dumps(value).encode(), self._state.timeout)
        return [json.loads(answer) for answer in answers]

    def _trace(self, span: Span) -> None:
        if span.iteration < _TRACED:
            self._spans.append(span)

    def gather_spans(self) -> list[Span]:
        """Gather all workers' spans on worker 0, each on its worker's clock from its first span."""
        gathered = self.gather([asdict(span) for span in self._spans])
        found = []
        for documents in gathered if self.gossip.rank == 0 else []:
            spans = [Span(**fields) for fields in documents]
            origin = min((span.start for span in spans), default=0.0)
            found += [replace(s, start=s.start - origin, end=s.end - origin) for s in spans]
        return found

    # -- what outlives a process ------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return asdict(self.progress) | {"counted": self._counted}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""
        self.progress = Progress.read(state)
        self._counted = int(state.get("counted", self.gossip.iteration))


def _means(told: Sequence[Mapping[str, float | None]]) -> dict[str, Any]:
    names = dict.fromkeys(name for one in told for name in one)
    known = {n: [value for one in told if (value := one.get(n)) is not None] for n in names}
    return {name: sum(values) / len(values) for name, values in known.items() if values}


class Recorder:
    """A run's directory and all that is made from it, for a training loop of one's own.

    Each call is one epoch, or whatever lies between two calls: `log(loss=...)` on every worker. It
    writes a record over all workers, as `matcha train` does for a task: loss, disagreement, time,
    bytes. Time goes from one call to the last step before the next, so evaluation does not count.
    Constructing, calling and closing are collective.

    Args:
        gossip: what trains.
        directory: where the run is recorded; `matcha report` and `matcha watch` read it.
        target_loss: stop once the average model's loss on training data, the `train_loss` that
            the script logs, is there in two records in a row.
        checkpoint_every: records between checkpoints of all workers; 0 writes none.
        resume: go on with the run in `directory` from its newest checkpoint.
        stateful: what else to save and load with it: learning-rate schedules and whatever else
            has `state_dict` and `load_state_dict`, by name.
        generators: likewise random generators; torch's own (dropout) is kept anyway.
        config: choices to show in the report; they must be the same when resuming.
        serve: `[HOST:]PORT` at which a page shows the run while it goes; its end is the report.
        view: on worker 0's terminal, a line per record, a dashboard, or nothing.
        report: write `report.html` when all is done.
        tensorboard: write event files too.
        on_record: called on worker 0 with each record: `matcha.records` has W&B and MLflow.

    Attributes:
        directory: the run's.
        epoch: how many records there are, those of before a resume included.

    Raises:
        InputError: the directory holds a run and `resume` is not set, or holds none and it is.

    Example:
        ```python
        with Recorder(gossip, "runs/mine", checkpoint_every=1, resume=resume) as log:
            for epoch in log.epochs(40):
                log(loss=train_epoch(model, optimizer, loader))
        ```
    """

    def __init__(
        self,
        gossip: Gossip,
        directory: str | Path,
        *,
        target_loss: float | None = None,
        checkpoint_every: int = 0,
        resume: bool = False,
        stateful: Mapping[str, Any] | None = None,
        generators: Mapping[str, torch.Generator] | None = None,
        config: Mapping[str, Any] | None = None,
        serve: str | int | None = None,
        view: Literal["lines", "dashboard"] | None = "lines",
        report: bool = True,
        tensorboard: bool = False,
        on_record: Callable[[Record], object] | None = None,
    ) -> None:
        if not (isinstance(checkpoint_every, int) and checkpoint_every >= 0):
            raise InputError(
                f"checkpoint_every is {checkpoint_every!r}, but it is a number of records, or 0."
            )
        if view not in ("lines", "dashboard", None):
            raise InputError(f"view is {view!r}, but it is 'lines', 'dashboard' or None.")
        if target_loss is not None and not target_loss > 0:
            raise InputError(f"target_loss is {target_loss}, but it must be positive.")
        self.directory = Path(directory)
        self._gossip, self._target, self._view, self._report = gossip, target_loss, view, report
        self._stateful = dict(stateful or {})
        self._generators = {"torch": torch.default_generator, **(generators or {})}
        self._shows = [] if on_record is None else [on_record]
        self._last, self._is_open = 0, True
        self._page: LivePage | None = None
        self._closing = ExitStack()
        self._journal = Journal(self._save, checkpoint_every)
        self._ledger = Ledger(gossip)
        membership = gossip.membership
        self._came_late = membership is not None and membership.carry(self._state, self._load)
        self._together("record", lambda: self._check_folder(resume))
        if resume and not self._came_late:
            folder = self.directory / CHECKPOINTS
            self._load(gossip.load(folder, generators=self._generators))
        header = self._header(dict(config or {}))
        after = gossip.iteration if resume or self._came_late else None
        self._together("record", lambda: self._open(header, after))
        if self._is_primary and tensorboard:
            from matcha.records import tensorboard_logger

            board = tensorboard_logger(self.directory / "tensorboard")
            self._shows.append(self._closing.enter_context(board))
        if self._is_primary and view is not None:
            print(f"{gossip}; records in {self.directory}", flush=True)
            if view == "dashboard":
                self._begin_dashboard()
        if serve is not None:
            self._together("serve", lambda: self._serve(str(serve)))
        self._ledger.begin()

    @property
    def epoch(self) -> int:
        """How many records there are, those of before a resume included."""
        return self._ledger.progress.epoch

    @property
    def url(self) -> str | None:
        """Where this worker serves the live page; None where it does not."""
        return None if self._page is None else self._page.url

    @property
    def is_over(self) -> bool:
        """Whether the target is reached, or training has diverged."""
        progress, target = self._ledger.progress, self._target
        reached = target is not None and arrival(progress.train_losses, target) is not None
        return progress.diverged or reached

    @property
    def _is_primary(self) -> bool:
        gossip = self._gossip
        return gossip.state.placement.part == 0 and gossip.members[:1] == (gossip.rank,)

    # -- in the loop ------------------------------------------------------------------------------

    def epochs(self, last: int) -> Iterator[int]:
        """Count epochs from where the run is up to `last`; end at the target, or at divergence."""
        self._gossip.state.check_call("epochs")
        self._last = last
        while self.epoch < last and not self.is_over:
            before = self.epoch
            yield before
            if self.epoch == before:
                raise InputError("an epoch went by without a call of the Recorder: log(loss=...).")

    def __call__(self, loss: Any = None, **metrics: Any) -> Record:
        """Write a record of what was trained since the last one. Collective.

        Args:
            loss: this worker's own mean loss since then.
            metrics: what was found about the average model, `with gossip.averaged():`, by all
                workers or some: `train_loss`, `test_loss`, `accuracy`. Their mean counts.

        Returns:
            The record over all workers, the same on each.

        Raises:
            InputError: a name that records do not have, or no `train_loss` for a target.
        """
        unknown = next((name for name in metrics if name not in _METRICS), None)
        if unknown is not None:
            raise InputError(
                f"a record has no {unknown!r}, but loss, {', '.join(_METRICS)}: send other "
                "figures to your logger yourself."
            )
        if not self._is_open:
            raise InputError("the Recorder is closed: call it before its with statement ends.")
        self._gossip.state.check_call("record")
        ledger, optimizers = self._ledger, self._gossip.state.optimizers
        rate = float(optimizers[0].param_groups[0]["lr"]) if optimizers else 0.0
        mine = ledger.end(_number(loss), rate)
        told = {name: _number(value) for name, value in metrics.items()}
        if "accuracy" in told:
            told["test_accuracy"] = told.pop("accuracy")
        with ledger.off_the_clock():
            record = ledger.overall(mine, told)
            if record.train_loss is not None:
                ledger.progress.train_losses.append(record.train_loss)
            elif self._target is not None:
                raise InputError(
                    "target_loss speaks of the average model's loss on training data: evaluate it "
                    "inside gossip.averaged(), and log(train_loss=...)."
                )
            self._journal.add(mine)
            self._journal.add(record, is_last=self.is_over or self.epoch == self._last)
            if self._is_primary:
                self._show(record)
        ledger.begin()
        return record

    def _show(self, record: Record) -> None:
        if self._view == "lines":
            from matcha.report import words

            print(words.record_line(record, self._last or None), flush=True)
        for show in self._shows:
            show(record)

    # -- its files --------------------------------------------------------------------------------

    def _check_folder(self, resume: bool) -> None:
        if resume and not holds_run(self.directory):
            raise InputError(
                f"{str(self.directory)!r} holds no run to go on with: leave resume out to start it."
            )
        if not resume and not self._came_late and holds_run(self.directory):
            raise InputError(
                f"{str(self.directory)!r} already holds a run: choose another directory, or give "
                "resume=True to go on with it."
            )

    def _open(self, header: RunHeader, after: int | None) -> None:
        if self._gossip.state.placement.part == 0:  # of a worker of several processes the first
            self._journal.writer = self._closing.enter_context(
                RunWriter(
                    self.directory,
                    header,
                    self._gossip.plan,
                    after=after,
                    primary=lambda: self._is_primary,
                )
            )

    def _together(self, what: str, act: Callable[[], None]) -> None:
        """What is wrong in one process ends all: the others would wait for it."""
        if self._came_late:  # the others have begun long ago
            act()
        else:
            together(self._gossip.state, what, act, InputError)

    def _header(self, config: dict[str, Any]) -> RunHeader:
        gossip, plan = self._gossip, self._gossip.plan
        settings = {
            "optimizer": ", ".join(type(o).__name__ for o in gossip.state.optimizers),
            "target_loss": self._target,
            **config,
        }
        script = {"script": shlex.join(sys.argv)} if sys.argv[0] else {}
        return RunHeader(
            name=self.directory.name,
            kind="training",
            task=Path(sys.argv[0]).stem or "script",
            strategy=plan.strategy,
            budget=plan.budget,
            seed=plan.seed,
            num_workers=gossip.num_workers,
            clock="wall",
            wire=plan.wire.name,
            momentum=gossip.state.momentum.spec.kind,
            config=json.loads(json.dumps({"settings": settings, **script}, default=str)),
        )

    def _save(self) -> None:
        self._gossip.save(
            self.directory / CHECKPOINTS,
            extra=self._state(),
            generators=self._generators,
        )

    def _state(self) -> dict[str, Any]:
        stateful = {name: one.state_dict() for name, one in self._stateful.items()}
        return self._ledger.state() | {"stateful": stateful}

    def _load(self, found: Mapping[str, Any]) -> None:
        self._ledger.load(found)
        saved = found.get("stateful", {})
        for name, one in self._stateful.items():
            if name not in saved:
                raise InputError(f"the checkpoint has no {name!r}: resume with the same stateful.")
            one.load_state_dict(saved[name])

    # -- what a person sees -----------------------------------------------------------------------

    def _begin_dashboard(self) -> None:
        from matcha.report.watch import watch

        over = threading.Event()
        thread = threading.Thread(
            target=watch, args=(self.directory,), kwargs={"until": over.is_set}, daemon=True
        )
        thread.start()
        self._closing.callback(thread.join)
        self._closing.callback(over.set)

    def _serve(self, where: str) -> None:
        from matcha.report.live import LivePage, heartbeat

        if self._is_primary:
            self._page = LivePage(self.directory, where)
            self._closing.enter_context(heartbeat(self.directory, self._gossip.state.whereabouts))
            print(f"live at {self._page.url}", flush=True)

    def close(self) -> None:
        """Write what is left, and the report. Collective; may be called twice."""
        if not self._is_open:
            return
        spans = self._ledger.gather_spans()
        for span in spans:
            self._journal.add(span)
        if self._end() and self._report and self.epoch:
            from matcha.report import write_report

            page = write_report([self.directory], self.directory / "report.html")
            if self._view is not None:
                print(f"report in {page}", flush=True)
        if self._page is not None:
            self._page.finish()

    def _end(self) -> bool:
        """End what was opened; whether this worker writes what is of the run as a whole."""
        primary, self._is_open = self._is_primary, False
        self._closing.close()
        return primary

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        # Others may be gone: nothing collective. What is written stays, line by line.
        primary = self._end()
        if self._page is not None:
            self._page.finish(patience=0.0)
        if primary and self._view is not None:
            how = "there is no checkpoint (checkpoint_every=...) that resume=True could go on from."
            if saved := checkpoints(self.directory / CHECKPOINTS):
                how = f"resume=True goes on at iteration {saved[-1].iteration}."
            print(f"matcha: stopped; {how}", file=sys.stderr, flush=True)


def _number(value: Any) -> float | None:
    """A number or a tensor as a number."""
    return None if value is None else float(getattr(value, "detach", lambda: value)())
