"""A worker: one process of a job on real workers, from its first record to its last."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from matcha.distributed.checkpoint.checkpoint import checkpoints
from matcha.distributed.training import Training
from matcha.distributed.transports.base import Transport
from matcha.distributed.transports.slow_links import SlowLinks
from matcha.errors import InputError
from matcha.records import Record, holds_run, read_run
from matcha.training.jobs import Job, carry_out, check_free

__all__ = ["Network", "check_resumable", "run_worker"]

CHECKPOINTS = "checkpoints"
STAGES = "stages.json"
"""The plan as it became, where it followed the network."""
_SHOWN = (
    "train_loss",
    "worker_loss",
    "test_loss",
    "test_accuracy",
    "consensus_distance",
    "comm_units",
    "megabytes_sent",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """How real workers talk."""

    deadline: float = 300.0
    """Seconds after which a silent worker is an error."""
    link_mbps: float | None = None
    """Slow every link down to this speed, by emulation."""
    on_loss: Literal["stop", "continue"] | None = None
    """What to do when a worker is lost; None: as the launcher says."""
    replan: int | None = None
    """Iterations after which the plan follows the network; None: as the launcher says."""

    def __post_init__(self) -> None:
        if not self.deadline > 0:
            raise InputError(f"the deadline is {self.deadline}, but it must be positive seconds.")
        if self.link_mbps is not None and not 0 < self.link_mbps < math.inf:
            raise InputError(f"the links' speed must be positive, not {self.link_mbps} Mbit/s.")

    def describe(self) -> dict[str, Any]:
        """What the run's header says of it."""
        if self.link_mbps is None:
            return {}
        return {"link_mbps": f"{self.link_mbps:g} (emulated)"}


def check_resumable(job: Job, network: Network) -> None:
    """Say before any worker is started why a run cannot go on.

    Raises:
        InputError: It was started with other choices, or there is nothing left to train.
    """
    check_free([replace(job, network=network.describe())], resume=True)
    records = read_run(job.folder).records if holds_run(job.folder) else ()
    if not records:
        return
    losses = [loss for record in records if (loss := record.train_loss) is not None]
    last = records[-1]
    saved = checkpoints(job.folder / CHECKPOINTS)
    # The last epoch may be recorded and not saved: it is trained again.
    if job.settings.is_over(int(last.epoch), last.worker_loss, losses) and (
        not saved or saved[-1].iteration >= last.iteration
    ):
        raise InputError(
            "there was nothing left to train: the run is at its last epoch already; --epochs gives "
            "it more."
        )


def run_worker(
    job: Job,
    transport: Transport,
    network: Network | None = None,
    *,
    resume: bool = False,
    checkpoint_every: int = 0,
    tensorboard: bool = False,
    on_record: Callable[[Record], None] | None = None,
) -> list[Record]:
    """Train one worker's part of a job and return the records over all workers. Collective.

    Args:
        job: what is run, the same on every worker.
        transport: how messages travel.
        network: what is known about the links.
        resume: go on from the newest checkpoint in the job's directory.
        checkpoint_every: epochs between checkpoints; 0 writes none.
        tensorboard: also write event files.
        on_record: called with each record over all workers, for progress.

    Raises:
        InputError: the run to go on with was started with other choices.
        DataError: there is no checkpoint to go on from, or it is damaged.
    """
    network = network or Network()
    job = replace(job, kind="training", network=network.describe())
    if network.link_mbps is not None:
        transport = SlowLinks(transport, network.link_mbps)
    training = Training(
        job.task.make(),
        job.plan,
        job.settings,
        transport,
        deadline=network.deadline,
        on_loss=network.on_loss,
        replan=network.replan,
    )
    folder = job.folder / CHECKPOINTS
    if resume:
        check_free([job], resume=True)
        training.load(folder)
    records = []
    with _board(job.folder, wanted=tensorboard and training.rank == 0) as show:
        for record in carry_out(
            job,
            training,
            folder,
            resume=resume or training.came_late,
            checkpoint_every=checkpoint_every,
            primary=lambda: training.rank == transport.members[0],
        ):
            records.append(record)
            show(record)
            if on_record is not None:
                on_record(record)
    made = training.gossip.plan
    if made is not job.plan and training.rank == transport.members[0]:
        made.save(job.folder / STAGES)  # what a simulation needs to play the same rounds
    return records


@contextmanager
def _board(directory: Path, *, wanted: bool) -> Iterator[Callable[[Record], None]]:
    """Writes records as TensorBoard's event files, where that is wanted."""
    if not wanted:
        yield lambda _: None
        return
    from torch.utils.tensorboard import SummaryWriter

    board: Any = SummaryWriter(str(directory / "tensorboard"))

    def show(record: Record) -> None:
        for name in _SHOWN:
            value = getattr(record, name)
            if value is not None:
                board.add_scalar(name, value, record.iteration)

    try:
        yield show
    finally:
        board.close()
