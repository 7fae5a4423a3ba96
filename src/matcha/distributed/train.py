"""Training: a task on real workers, started here or one of them being this process."""

from __future__ import annotations

import copy
import logging
import math
import pickle
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from matcha._io import explain_write_errors, fingerprint
from matcha.distributed.checkpoint import checkpoints
from matcha.distributed.gossip import Gossip
from matcha.distributed.launch.launcher import PLAN_VARIABLE, Hosts, launch, local_links
from matcha.distributed.launch.placement import (
    LOSS_VARIABLE,
    REPLAN_VARIABLE,
    LinkAddress,
    is_worker,
    join_team,
    own_facts,
    worker_transport,
)
from matcha.distributed.links.joining import Joining
from matcha.distributed.options import GossipOptions, Setup, check_setup, find_exclusion
from matcha.distributed.recorder import CHECKPOINTS, Ledger
from matcha.distributed.transports.base import Transport
from matcha.distributed.transports.collectives import agree, mean_
from matcha.distributed.transports.emulation import SlowLinks
from matcha.errors import InputError
from matcha.plans import PlanLike
from matcha.records import COMMAND_VARIABLE, Entry, Record, Run, holds_run, invoked, read_run
from matcha.timing import Units, ring_hop
from matcha.topology import Link
from matcha.training.differing import correction, data_differ
from matcha.training.evaluation import (
    Score,
    divergence,
    finish_average,
    function_distance,
    outputs,
    sample_losses,
    score,
)
from matcha.training.jobs import Job, Progress, carry_out, check_free, identity
from matcha.training.settings import Delays, Execution, Settings
from matcha.training.task import Task, TaskSpec, dealt
from matcha.zoo.recipes import Choices, recipe

_log = logging.getLogger("matcha")
STAGES = "stages.json"
"""The plan as it became, where it followed the network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """How real workers are started and talk."""

    timeout: float | None = None
    """Seconds after which a silent worker is an error; None: as iterations last, 300 at least."""
    link_mbps: float | None = None
    """Slow every link down to this speed, by emulation."""
    slower: Mapping[Link, float] = field(default_factory=dict)
    """Links of the plan's graph that are emulated to be slower than that, by factors."""
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
    joining: Joining | None = None
    """The running team that this process joins as one worker, and the member that it asked."""

    def __post_init__(self) -> None:
        if self.timeout is not None and not self.timeout > 0:
            raise InputError(f"the timeout is {self.timeout}, but it must be positive seconds.")
        if self.link_mbps is not None and not 0 < self.link_mbps < math.inf:
            raise InputError(f"the links' speed must be positive, not {self.link_mbps} Mbit/s.")
        if self.links and self.hosts.number > 1:
            raise InputError("links across machines: start each worker with --peers, --rank.")
        if not all(0 < factor < math.inf for factor in self.slower.values()):
            raise InputError(f"links are slower by positive factors, not {dict(self.slower)}.")

    def choices(self) -> dict[str, Any]:
        """What `Gossip` takes of it."""
        return {"timeout": self.timeout, "on_loss": self.on_loss, "replan": self.replan}

    def describe(self) -> dict[str, Any]:
        """What the run's header says of it."""
        if self.link_mbps is None:
            return {}
        slow = [f", link {i}-{j} at {self.link_mbps / f:g}" for (i, j), f in self.slower.items()]
        return {"link_mbps": f"{self.link_mbps:g}{''.join(slow)} (emulated)"}

    def slow_down(self, transport: Transport, plan: PlanLike) -> Transport:
        """The transport at the speed of the emulated links, where they are emulated."""
        if self.link_mbps is None:
            return transport
        # An all-reduce takes what the plan says: its best ring along the links of the graph.
        hop = ring_hop(Units(), plan.topology, self.slower)
        return SlowLinks(transport, self.link_mbps, self.slower, hop=hop)


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
    live: bool = False,
    on_record: Callable[[Record], None] | None = None,
    meanwhile: Callable[[Callable[[], bool]], object] | None = None,
) -> None:
    """Train a job on real workers: start them, or be one where a launcher started this process.

    Options and `on_record` are as for `run_worker`; where worker 0 is a process of its own, the
    function must be one that pickle finds there. With `meanwhile`, for which see `launch`, what
    workers print goes to files.
    """
    network = network or Network()
    if checkpoint_every < 0:
        raise InputError(f"checkpoint_every is {checkpoint_every}, but it is 0 or more epochs.")
    options: dict[str, Any] = {
        "resume": resume,
        "checkpoint_every": checkpoint_every,
        "tensorboard": tensorboard,
        "live": live,
    }
    if (joining := network.joining) is not None:
        network = replace(network, on_loss="continue")
        chosen = _gossip_options(job.settings, **network.choices())
        joining.check(own_facts(joining.given, chosen.with_launcher().describe()))
        made = job.task.make()  # all that takes long, before the others count on this worker
        _warm_up(made, job.settings)
        job = replace(job, plan=joining.given, task=TaskSpec.of(made))
        with closing(join_team(joining)) as team:
            run_worker(job, team, network, on_record=on_record, **options)
    elif is_worker(network.address):
        with worker_transport(job.plan.topology, network.address) as transport:
            show = on_record if transport.rank == 0 else None
            records = run_worker(job, transport, network, on_record=show, **options)
        if transport.rank == 0 and not records:
            raise InputError("there was nothing left to train: the run is at its last epoch.")
    else:
        _check_startable(job, network, resume=resume)
        sent = job, replace(network, links=False)
        with tempfile.TemporaryDirectory(prefix="matcha-") as folder:
            file = Path(folder) / "job"
            try:
                file.write_bytes(pickle.dumps((*sent, pickle.dumps(on_record), options)))
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise InputError(
                    "workers are processes of their own, and this job cannot be sent to them: "
                    f"{error}."
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


def _gossip_options(settings: Settings, **others: Any) -> GossipOptions:
    """How workers exchange: as the settings say, and what the network adds."""
    return GossipOptions(
        overlap=settings.overlap, momentum=settings.momentum, clip=settings.clip, **others
    )


def _warm_up(task: Task, settings: Settings) -> None:
    """What torch does at its first optimizer and step takes seconds, mostly imports."""
    model = task.model()
    optimizers = settings.optimizer.for_model(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for optimizer in optimizers:
        optimizer.step()


def launch_script(
    script: Sequence[str],
    plan: PlanLike,
    network: Network | None = None,
    plan_file: Path | None = None,
) -> None:
    """Run a script with its arguments as the plan's workers; `$MATCHA_PLAN` has the plan's path.

    The network says what the script does not; the plan may lie in a file already.
    """
    network = network or Network()
    if is_worker(network.address):
        raise InputError("a script that is one worker is started by itself: python SCRIPT.")
    check_setup(Setup(options=GossipOptions(**network.choices()), plan=plan))
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
    chosen = _gossip_options(settings, **network.choices())
    check_setup(
        Setup(options=chosen, plan=plan, momentum=job.momentum, optimizers=(settings.optimizer,))
    )
    check_free([job], resume=resume)
    check_trainable(job.task.make(), plan, settings)
    job.header()
    records = read_run(job.folder).records if resume and holds_run(job.folder) else ()
    if not records:
        return
    losses = [loss for record in records if (loss := record.train_loss) is not None]
    last, saved = records[-1], checkpoints(job.folder / CHECKPOINTS)
    # The last epoch may be recorded and not saved: it is trained again.
    if settings.is_over(int(last.epoch), last.worker_loss, losses) and (
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
    live: bool = False,
    on_record: Callable[[Record], None] | None = None,
    max_seconds: float = math.inf,
) -> list[Record]:
    """Train one worker's part of a job and return the records over all workers. Collective.

    Args:
        job: what is run, the same on every worker, as all that follows.
        transport: how messages travel.
        network: how fast, and what happens when a worker is lost.
        resume: continue from the newest checkpoint in the job's directory.
        checkpoint_every: epochs between checkpoints; 0 writes none.
        tensorboard: also write event files.
        live: also write where the run is between its records, for `matcha.report.live`.
        on_record: called with each record over all workers.
        max_seconds: on the run's clock; after that no further epoch begins.

    Raises:
        InputError: the run to go on with was started with other choices.
        DataError: there is no checkpoint to go on from, or it is damaged.
    """
    network = network or Network()
    job = replace(job, kind="training", network=network.describe())
    transport = network.slow_down(transport, job.plan)
    task = job.task.make()
    training = Training(task, job.plan, job.settings, transport, **network.choices())
    folder = job.folder / CHECKPOINTS
    if network.on_loss == "continue" and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, lambda *_: training.gossip.leave())
    if resume:
        check_free([job], resume=True)
        training.load(folder)
    records = []
    shows = [] if on_record is None else [on_record]

    def is_primary() -> bool:
        return training.rank == transport.members[0]

    with ExitStack() as stack:
        if live and is_primary():
            from matcha.report.live import heartbeat

            stack.enter_context(heartbeat(job.folder, training.gossip.state.whereabouts))
        if tensorboard and training.rank == 0:
            from matcha.records import tensorboard_logger

            board = tensorboard_logger(job.folder / "tensorboard")
            shows.append(stack.enter_context(board))
        for record in carry_out(
            job,
            training,
            folder,
            resume=resume or training.came_late,
            checkpoint_every=checkpoint_every,
            primary=is_primary,
        ):
            records.append(record)
            training.is_stopped = record.time >= max_seconds
            for show in shows:
                show(record)
    made = training.gossip.plan
    stays = training.rank in training.gossip.members
    if made is not job.plan and stays and is_primary():
        made.save(job.folder / STAGES)  # what a simulation needs to play the same rounds
    return records


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
        **options: Any,
    ) -> None:
        check_trainable(task, plan, settings)
        self.task, self.plan, self.settings = task, plan, settings
        self.device = torch.device(settings.execution.device)
        task.to(self.device, settings.execution.compute_dtype)
        self.model = task.model().to(self.device, settings.execution.dtype)
        self.optimizers = settings.optimizer.for_model(self.model)
        self.identity = identity(task, plan, settings)
        chosen = _gossip_options(settings, **options)
        if (better := correction(settings)) is not None:
            asked = Setup(
                options=chosen.with_launcher(),
                plan=plan,
                momentum=better,
                optimizers=tuple(self.optimizers),
            )
            if find_exclusion(asked) is None and data_differ(task, settings.execution):
                chosen = replace(chosen, momentum=better)
        self.gossip = Gossip(self.model, self.optimizers, plan, transport=transport, options=chosen)
        self.rank = self.gossip.rank
        self.is_stopped = False
        """Whether no further epoch begins; the same on all workers."""
        self.ledger = Ledger(self.gossip)
        membership = self.gossip.membership
        self.came_late = membership is not None and membership.carry(
            self.ledger.state, self.ledger.load
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
        return self.is_stopped or self.progress.is_over(self.settings)

    @property
    def progress(self) -> Progress:
        """How far it is."""
        return self.ledger.progress

    def __iter__(self) -> Iterator[Entry]:
        while not self.is_over:
            epoch = self.progress.epoch
            loss, rate = self._train()
            if self.rank not in self.gossip.members:
                return
            if self.progress.epoch != epoch:  # it was away, and goes on where the others are
                continue
            mine = self.ledger.end(loss, rate)
            with self.ledger.off_the_clock():
                record = self._overall(mine)
            yield from (mine, record)
        with self.ledger.off_the_clock():
            spans = self.ledger.gather_spans()
        yield from spans
        self.gossip.detach()

    # -- one epoch --------------------------------------------------------------------------------

    def _train(self) -> tuple[float | None, float]:
        """One epoch; returns this worker's mean loss and its last rate."""
        steps = self.task.steps_per_epoch
        task, choices, plan = self._choices()
        state = tuple(tensor.to(self.device) for tensor in task.initial_state())
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        done, epoch, rate = 0, self.progress.epoch, 0.0
        self.model.train()
        self.ledger.begin()
        # By the plan's count, not by a loop's own: a worker that is back starts midway.
        while (k := self.gossip.iteration - epoch * steps) < steps and self.progress.epoch == epoch:
            if self.gossip.plan is not plan:  # workers joined or left: the data are dealt again
                task, choices, plan = self._choices()
            rate = self.settings.schedule.rate(epoch + k / steps, self.progress.test_losses)
            # Of all workers' rows this one takes its own: a row's place is its worker's number.
            inputs, targets = task.batch({name: table[k] for name, table in choices.items()})
            with self.settings.execution.autocast():
                loss, state = task.loss(self.model, inputs[self.rank], targets[self.rank], state)
            state = tuple(tensor.detach() for tensor in state)
            self._step(loss, rate)
            if self.rank not in self.gossip.members:
                break
            total += loss.detach()
            done += 1
        return float(total) / done if done else None, rate

    def _choices(self) -> tuple[Task, dict[str, torch.Tensor], PlanLike]:
        """The task for the workers of the plan in force, and what an epoch's batches hold."""
        plan = self.gossip.plan
        task = dealt(self.task, plan)
        tables = task.tables(self.progress.epoch)
        return task, {n: torch.from_numpy(t).to(self.device) for n, t in tables.items()}, plan

    def _step(self, loss: torch.Tensor, rate: float) -> None:
        self.model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        limit = self.settings.optimizer.clip_norm
        if limit is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        for group in (g for optimizer in self.optimizers for g in optimizer.param_groups):
            group["lr"] = rate
        for optimizer in self.optimizers:
            optimizer.step()

    def _shares(self) -> list[int]:
        """Whose training data this worker evaluates the average model on."""
        if not self.gossip.state.has_changed:
            return [self.rank]
        members = self.gossip.members
        place = members.index(self.rank)
        return [w for w in range(self.task.num_workers) if w % len(members) == place]

    # -- what is known after it -------------------------------------------------------------------

    def _overall(self, mine: Record) -> Record:
        """The record over all workers, the same bits on each."""
        record = self.ledger.overall(mine)
        due = self.settings.is_due(self.progress.epoch)
        if self.progress.diverged or not due:
            return record
        found = self._evaluate()
        self.progress.add(found)
        # How far apart the workers' own answers to a fixed batch are, where there are classes.
        own, distance = outputs(self.model, self.task, self.settings), None
        if own is not None:
            mean = own.clone()
            mean_(self.gossip.state.transport, [mean], self.gossip.state.timeout)
            distance = function_distance(self.ledger.gather(divergence(own, mean)))
        return replace(record, **found.fields(), function_distance=distance)

    def _evaluate(self) -> Score:
        """The average model on training data, each worker on its share, and on held-out data.

        All evaluate the latter, as waiting for one would take as long; but their processors may
        round differently, and learning rates that follow the loss must not part: what worker 0
        finds counts.
        """
        with self.gossip.averaged() as averaged:
            model = finish_average(copy.deepcopy(averaged), self.task, self.settings)
        own = sample_losses(model, self.task, self.settings, workers=self._shares())
        batches = [loss for losses in self.ledger.gather(own) for loss in losses]
        found = score(model, self.task, self.settings, batches)
        answer = self.ledger.gather([found.train_loss, found.test.loss, found.test.accuracy])[0]
        test = replace(found.test, loss=answer[1], accuracy=answer[2])
        return replace(found, train_loss=answer[0], test=test)

    # -- checkpoints ------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write a checkpoint of all workers into a folder. Collective."""
        if self.gossip.state.has_changed:
            if self.rank == self.gossip.members[0]:
                _log.warning("no checkpoint is written: the team has changed since it started")
            return
        with self.ledger.off_the_clock():
            self.gossip.save(
                path,
                extra=self.ledger.state(),
                generators=self._generators(),
                identity=self.identity,
            )

    def load(self, path: Path) -> None:
        """Continue from the newest checkpoint in a folder, to the same bits. Collective.

        Raises:
            DataError: there is none, or it is damaged.
            InputError: it is of another plan, task or settings.
        """
        with self.ledger.off_the_clock():
            extra = self.gossip.load(path, generators=self._generators(), identity=self.identity)
        self.ledger.load(extra)

    def _generators(self) -> dict[str, torch.Generator]:
        """What dropout draws from."""
        if self.device.type == "cuda":
            return {"torch": torch.cuda.default_generators[self.device.index or 0]}
        return {"torch": torch.default_generator}


def check_trainable(task: Task, plan: PlanLike, settings: Settings) -> None:
    """Refuse a task for another number of workers, and settings that only a simulation has."""
    if task.num_workers != plan.num_workers:
        raise InputError(
            f"the plan is for {plan.num_workers} workers and the task for {task.num_workers}."
        )
    options = GossipOptions(asynchronous=settings.asynchronous)
    check_setup(Setup(options=options, plan=plan, call="train"))
    execution = settings.execution
    usual = Execution(device=execution.device, precision=execution.precision)
    if execution != usual or settings.delays != Delays():
        raise InputError(
            "delays, batching, streams, capture and compile are choices of a simulation: real "
            "workers have a clock and a device each, so leave them out."
        )
