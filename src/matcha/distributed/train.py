"""`train`: a task on real workers, started here or one of them being this process."""

from __future__ import annotations

import math
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from matcha._io import explain_write_errors
from matcha.distributed.checkpoint.checkpoint import checkpoints
from matcha.distributed.launch.environment import (
    LOSS_VARIABLE,
    REPLAN_VARIABLE,
    LinkAddress,
    is_worker,
    worker_transport,
)
from matcha.distributed.launch.launcher import PLAN_VARIABLE, Hosts, launch, local_links
from matcha.distributed.options import GossipOptions, Setup, check_setup
from matcha.distributed.training import Training, check_trainable
from matcha.distributed.transports.base import Transport
from matcha.distributed.transports.slow_links import SlowLinks
from matcha.errors import InputError
from matcha.plans import PlanLike
from matcha.records import COMMAND_VARIABLE, Record, Run, holds_run, invoked, read_run
from matcha.training.jobs import Job, carry_out, check_free
from matcha.training.settings import Settings
from matcha.training.task import TaskSpec
from matcha.zoo.recipes import Choices, recipe

__all__ = ["Network", "launch_script", "run_worker", "train", "train_job"]

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
    """How real workers are started and talk."""

    timeout: float = 300.0
    """Seconds after which a silent worker is an error."""
    link_mbps: float | None = None
    """Slow every link down to this speed, by emulation."""
    on_loss: Literal["stop", "continue"] | None = None
    """What to do when a worker is lost; None: as the launcher says. `continue` needs links."""
    restarts: int = 0
    """How often a local worker that fails is started again, where the others continue."""
    replan: int | None = None
    """Iterations after which the plan follows the network; None: as the launcher says."""
    links: bool = False
    """Whether workers that are started here talk over one connection per link."""
    keys: Path | None = None
    """A directory of keys, for TLS on those links; None is plain TCP."""
    hosts: Hosts = Hosts()  # noqa: RUF009  (frozen)
    """The machines on which workers are started."""
    address: LinkAddress | None = None
    """This process's, where it is one worker over links of our own and its launcher did not say."""

    def __post_init__(self) -> None:
        if not self.timeout > 0:
            raise InputError(f"the timeout is {self.timeout}, but it must be positive seconds.")
        if self.link_mbps is not None and not 0 < self.link_mbps < math.inf:
            raise InputError(f"the links' speed must be positive, not {self.link_mbps} Mbit/s.")
        if self.links and self.hosts.number > 1:
            raise InputError("links across machines: start each worker with --peers, --rank.")

    def describe(self) -> dict[str, Any]:
        """What the run's header says of it."""
        if self.link_mbps is None:
            return {}
        return {"link_mbps": f"{self.link_mbps:g} (emulated)"}


# -- starting workers ------------------------------------------------------------------------------


def train(
    task: str | TaskSpec,
    plan: PlanLike,
    settings: Settings | None = None,
    *,
    output: str | Path,
    network: Network | None = None,
    checkpoint_every: int = 0,
    resume: bool = False,
) -> Run:
    """Train a task on real workers, one process each, and return the run.

    Args:
        task: a recipe's name, or a recipe's `spec` with choices of your own.
        plan: who talks when.
        settings: how to train; None takes the recipe's, where the task is a recipe's name.
        output: the directory in which the run is recorded.
        network: how workers are started and talk; by default on this machine.
        checkpoint_every: epochs between checkpoints; 0 writes none.
        resume: continue the run in `output` from its newest checkpoint.

    Raises:
        InputError: plan, task and settings do not fit together, or the directory holds a run.
        WorkerError: a worker failed.
        ExchangeError: a worker was lost.

    Example:
        ```python
        run = matcha.distributed.train("digits", plan, output="runs/first")
        ```
    """
    if isinstance(task, str):
        chosen = recipe(task)
        settings = settings or chosen.settings()
        task = chosen.spec(Choices(num_workers=plan.num_workers))
    if settings is None:
        raise InputError("settings may be left out for a recipe's name only: give Settings.")
    folder = Path(output)
    job = Job(directory=folder, task=task, plan=plan, settings=settings, name=folder.name)
    train_job(job, network, checkpoint_every=checkpoint_every, resume=resume)
    return read_run(folder)


def train_job(
    job: Job,
    network: Network | None = None,
    *,
    resume: bool = False,
    checkpoint_every: int = 0,
    tensorboard: bool = False,
    on_record: Callable[[Record], None] | None = None,
    meanwhile: Callable[[Callable[[], bool]], object] | None = None,
) -> None:
    """Train a job on real workers: start them, or be one where a launcher started this process.

    Args:
        job: what is run.
        network: how workers are started and talk.
        resume: continue from the newest checkpoint in the job's directory.
        checkpoint_every: epochs between checkpoints; 0 writes none.
        tensorboard: also write event files.
        on_record: called on worker 0 with each record over all workers. Where that is a process of
            its own, the function must be one that pickle finds there.
        meanwhile: as in `launch`; what workers print then goes to files.

    Raises:
        InputError: the job cannot be run; no worker was started.
        WorkerError: a worker failed.
        ExchangeError: a worker was lost.
    """
    network = network or Network()
    job = replace(job, kind="training", network=network.describe())
    if checkpoint_every < 0:
        raise InputError(f"checkpoint_every is {checkpoint_every}, but it is 0 or more epochs.")
    options: dict[str, Any] = {
        "resume": resume,
        "checkpoint_every": checkpoint_every,
        "tensorboard": tensorboard,
    }
    if is_worker(network.address):
        with worker_transport(job.plan.topology, network.address) as transport:
            show = on_record if transport.rank == 0 else None
            records = run_worker(job, transport, network, on_record=show, **options)
        if transport.rank == 0 and not records:
            raise InputError("there was nothing left to train: the run is at its last epoch.")
        return
    _check_startable(job, network, resume=resume)
    with tempfile.TemporaryDirectory(prefix="matcha-") as folder:
        file = Path(folder) / "job"
        try:
            shown = pickle.dumps(on_record)
            file.write_bytes(pickle.dumps((job, replace(network, links=False), shown, options)))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise InputError(
                f"workers are processes of their own, and this job cannot be sent to them: {error}."
            ) from None
        with explain_write_errors(job.folder):
            job.folder.mkdir(parents=True, exist_ok=True)
        command = invoked()
        _launch(
            ["-m", "matcha.distributed.launch.worker", str(file)],
            job.plan,
            network,
            Path(folder),
            {COMMAND_VARIABLE: command} if command else {},
            logs=None if meanwhile is None else job.folder / "logs",
            meanwhile=meanwhile,
        )


def launch_script(
    script: Sequence[str],
    plan: PlanLike,
    network: Network | None = None,
    plan_file: Path | None = None,
) -> None:
    """Run a script as the plan's workers; `$MATCHA_PLAN` has the plan's path.

    Args:
        script: its path and its arguments.
        plan: who talks when.
        network: how workers are started and talk, where the script does not say.
        plan_file: where the plan lies already.

    Raises:
        InputError: the plan does not go with the network's options, or this process is a worker.
        WorkerError: a worker failed.
        ExchangeError: a worker was lost.
    """
    network = network or Network()
    if is_worker(network.address):
        raise InputError("a script that is one worker is started by itself: python SCRIPT.")
    options = GossipOptions(on_loss=network.on_loss, replan=network.replan)
    check_setup(Setup(options=options, plan=plan))
    network.hosts.share(plan.num_workers)
    with tempfile.TemporaryDirectory(prefix="matcha-") as folder:
        path = plan_file or Path(folder) / "plan.json"
        if plan_file is None:
            plan.save(path)
        environment = {PLAN_VARIABLE: str(path.resolve())}
        if network.on_loss is not None:
            environment[LOSS_VARIABLE] = network.on_loss
        if network.replan is not None:
            environment[REPLAN_VARIABLE] = str(network.replan)
        _launch(script, plan, network, Path(folder), environment)


def _launch(
    command: Sequence[str],
    plan: PlanLike,
    network: Network,
    folder: Path,
    environment: Mapping[str, str],
    **options: Any,
) -> None:
    if network.links:
        environment = {**environment, **local_links(plan.num_workers, folder, network.keys)}
    launch(
        command,
        plan.num_workers,
        environment=environment,
        hosts=network.hosts,
        restarts=network.restarts,
        **options,
    )


def _check_startable(job: Job, network: Network, *, resume: bool) -> None:
    """Say before any worker is started what every worker would find wrong."""
    settings, plan = job.settings, job.plan
    network.hosts.share(plan.num_workers)
    chosen = GossipOptions(
        overlap=settings.overlap,
        momentum=settings.momentum,
        clip=settings.clip,
        on_loss=network.on_loss,
        replan=network.replan,
    )
    check_setup(
        Setup(options=chosen, plan=plan, momentum=job.momentum, optimizers=(settings.optimizer,))
    )
    check_free([job], resume=resume)
    check_trainable(job.task.make(), plan, settings)
    job.header()
    if resume and holds_run(job.folder):
        _check_unfinished(job)


def _check_unfinished(job: Job) -> None:
    records = read_run(job.folder).records
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


# -- one worker ------------------------------------------------------------------------------------


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
        timeout=network.timeout,
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
