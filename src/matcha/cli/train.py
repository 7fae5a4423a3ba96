"""`matcha train`: a script or a built-in task on real workers."""

from __future__ import annotations

import logging
import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer

from matcha.cli import app
from matcha.cli.options import (
    BatchSize,
    Budget,
    Clip,
    Data,
    Deadline,
    Epochs,
    FolderOrNone,
    Json,
    LearningRate,
    Model,
    Momentum,
    Overlap,
    Partition,
    Report,
    Resume,
    Seed,
    Strategy,
    TopologyOption,
    WireOrPlans,
)
from matcha.cli.output import (
    Keep,
    console,
    free_directory,
    keeping,
    loss_in_words,
    make_folder,
    patient_progress,
    print_json,
    this_command,
)
from matcha.errors import InputError
from matcha.plans import PlanLike, load_plan
from matcha.records import COMMAND_VARIABLE, Record
from matcha.strategies import plan as make_plan
from matcha.topology import families
from matcha.wires import parse_wire

if TYPE_CHECKING:
    from matcha.distributed.launch.launcher import Hosts
    from matcha.distributed.worker import Network
    from matcha.training.jobs import Job


@app.command("train", context_settings={"allow_interspersed_args": True})
def train_command(
    target: str = typer.Argument(
        ..., metavar="SCRIPT|TASK", help="Your training script (.py), or a task such as digits."
    ),
    arguments: list[str] = typer.Argument(None, help="The script's own arguments, after --."),
    topology: TopologyOption = "paper:er8",
    strategy: Strategy = "matcha",
    budget: Budget = 0.5,
    wire: WireOrPlans = None,
    seed: Seed = 0,
    plan_file: Path | None = typer.Option(
        None, "--plan", help="A saved plan instead of topology, strategy and budget."
    ),
    output: FolderOrNone = None,
    epochs: Epochs = None,
    learning_rate: LearningRate = None,
    batch_size: BatchSize = None,
    momentum: Momentum = "local",
    model: Model = None,
    partition: Partition = "iid",
    data: Data = None,
    target_loss: float | None = typer.Option(None, help="Task: stop at this training loss."),
    overlap: Overlap = False,
    link_mbps: float | None = typer.Option(
        None, help="Task: slow links to this many Mbit/s. An emulation, by waiting."
    ),
    clip: Clip = None,
    deadline: Deadline = 300.0,
    checkpoint_every: int = typer.Option(0, help="Task: epochs between checkpoints; 0: none."),
    resume: Resume = False,
    tensorboard: bool = typer.Option(False, "--tensorboard", help="Task: also write event files."),
    watch: bool = typer.Option(False, "--watch", help="Task: a live dashboard instead of lines."),
    report: Report = True,
    hosts: int = typer.Option(1, help="Machines that take part, each running this command."),
    rendezvous: str | None = typer.Option(
        None, help="HOST:PORT of one of several machines, where they meet."
    ),
    host_rank: int | None = typer.Option(
        None, help="This machine's number, from 0, which is the one at --rendezvous."
    ),
    links: bool = typer.Option(
        False, "--links", help="Workers talk over connections of their own, one a link."
    ),
    keys: Path | None = typer.Option(
        None, help="Links: a directory from `matcha keys new`, for TLS; by default plain TCP."
    ),
    peers: str | None = typer.Option(
        None,
        help="Links across machines: a file of lines RANK HOST PORT, or slurm, rendezvous, or a "
        "pattern of names such as matcha-{rank}.matcha:29600. This process is then one worker.",
    ),
    rank: int | None = typer.Option(None, help="With --peers: this worker's number."),
    elastic: bool = typer.Option(
        False, "--elastic", help="Links: go on without a lost worker; local ones start again."
    ),
    restarts: int = typer.Option(10, help="With --elastic: how often a worker is started again."),
    replan: int = typer.Option(
        0, min=0, help="Every so many iterations, plan anew where links take other times; 0: never."
    ),
    as_json: Json = False,
) -> None:
    """Train decentralized on real workers, one process each.

    A script is started once a worker, as `torchrun` would, with the plan's path in
    [cyan]$MATCHA_PLAN[/]; it needs one line of its own: [cyan]Gossip(model, optimizer, plan)[/].
    A task is complete: data, model, optimizer, records, checkpoints.

    Under another launcher (torchrun, srun, mpirun) or with --peers this command is one worker and
    starts no others. With --elastic the team outlives its workers: one that dies is left out, and
    taken in again with a neighbour's state when it comes back.

    [bold]Examples[/]

      matcha train digits --strategy greedy --budget 0.3 --epochs 5

      matcha train digits -s greedy -b 0.02 --wire modulo:3

      matcha train my_script.py --topology ring:4 -- --batch-size 64

      matcha train digits --elastic --keys keys

      matcha train digits --plan plan.json --peers peers --rank 3 --keys keys -o runs/first

      torchrun --nproc-per-node=8 -m matcha.cli train digits --plan plan.json -o runs/first
    """
    if resume and output is None:
        raise InputError("--resume needs --output: the directory of the run to go on with.")
    if resume and plan_file is None and output is not None:
        plan_file = output / "plan.json"
    is_script = target.endswith(".py")
    if is_script and not Path(target).is_file():
        raise InputError(f"there is no script {target!r}.")
    if arguments and not is_script:
        raise InputError(f"a task takes no arguments of its own: {' '.join(arguments)!r}.")
    if not is_script:
        _check_task(target, momentum)
    from matcha.distributed.launch.environment import REPLAN_VARIABLE, is_worker
    from matcha.distributed.launch.launcher import Hosts
    from matcha.strategies.staged import check_followable

    _set_links(peers, rank, keys, links=links, elastic=elastic)
    machines = Hosts(number=hosts, rendezvous=rendezvous, rank=host_rank)
    plan = _plan(plan_file, topology, strategy, budget, seed, wire)
    machines.share(plan.num_workers)  # refused before anything is made
    if replan:
        check_followable(plan)
        os.environ[REPLAN_VARIABLE] = str(replan)  # where workers, this process or others, look
    if is_script:
        if is_worker():
            raise InputError("a script that is one worker is started by itself: python SCRIPT.")
        how = Launching(machines, links or elastic, keys, restarts if elastic else 0)
        _launch([target, *(arguments or [])], plan, plan_file, how)
        return
    from matcha.distributed.worker import Network, check_resumable
    from matcha.records import read_run
    from matcha.report import compare
    from matcha.training.jobs import Job, stem
    from matcha.training.settings import Settings
    from matcha.zoo.recipes import Choices, recipe

    directory = output or free_directory(Path("runs"), f"{target}-{stem(plan)}")
    if checkpoint_every < 0:
        raise InputError(f"--checkpoint-every is {checkpoint_every}, but it is 0 or more epochs.")
    chosen = recipe(target)
    number = chosen.epochs if epochs is None else epochs
    choices = Choices(
        num_workers=plan.num_workers,
        data=data,
        model=model,
        batch_size=batch_size,
        partition=partition,  # type: ignore[arg-type]
        seed=seed,
    )
    settings = Settings(
        epochs=number,
        schedule=chosen.schedule(number, learning_rate),
        optimizer=chosen.optimizer,
        clip=clip,
        momentum=momentum,
        overlap=overlap,
        target_loss=target_loss,
    )
    job = Job(
        directory=directory,
        task=chosen.spec(choices),
        plan=plan,
        settings=settings,
        kind="training",
        name=directory.name,
    )
    network = Network(
        deadline=deadline,
        link_mbps=link_mbps,
    )
    if not is_worker():
        if (directory / "run.json").exists() and not resume:
            raise InputError(f"{str(directory)!r} already holds a run: choose another --output.")
        chosen.task(choices)  # what is wrong with it is said once, not by every worker
        job.header()
        if resume:
            check_resumable(job, network)
        make_folder(directory)
        command = this_command("--output", str(directory))
        how = Launching(machines, links or elastic, keys, restarts if elastic else 0)
        _launch(command, plan, plan_file, how, watched=directory if watch else None)
        with keeping() as keep:
            if report and (directory / "run.json").exists():
                _report(directory, keep, quiet=as_json)
            if as_json:
                print_json(compare([read_run(directory)]).to_json())
            else:
                console.print(f"records in [cyan]{directory}[/]")
        return

    _work(job, network, resume, checkpoint_every, tensorboard, quiet=as_json)


class Launching(NamedTuple):
    """How workers are started and talk."""

    hosts: Hosts
    links: bool
    keys: Path | None
    restarts: int


def _set_links(
    peers: str | None, rank: int | None, keys: Path | None, *, links: bool, elastic: bool
) -> None:
    """Leave what was said about links where workers, this process or its children, look for it."""
    from matcha.distributed.launch.environment import (
        KEYS_VARIABLE,
        LOSS_VARIABLE,
        PEERS_VARIABLE,
    )

    if rank is not None and peers is None:
        raise InputError("--rank needs --peers: who the other workers are.")
    if keys is not None and not (links or elastic or peers or PEERS_VARIABLE in os.environ):
        raise InputError("--keys needs --links, --elastic or --peers: other links have no keys.")
    if peers is not None:  # this process is one worker: nobody else tells whom it waits for
        _show_links()
    said = {
        PEERS_VARIABLE: peers,
        "RANK": None if rank is None else str(rank),
        KEYS_VARIABLE: None if keys is None else str(keys),
        LOSS_VARIABLE: "continue" if elastic else None,
    }
    os.environ.update({name: value for name, value in said.items() if value is not None})


def _show_links() -> None:
    """Say who comes and goes, and who cannot be reached."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("matcha.links").setLevel(logging.INFO)


def _launch(
    command: list[str],
    plan: PlanLike,
    plan_file: Path | None,
    how: Launching,
    watched: Path | None = None,
) -> None:
    """Start the workers, each with the plan's path, and wait for them."""
    from matcha.distributed.launch.launcher import PLAN_VARIABLE, launch, local_links
    from matcha.report.watch import watch

    with tempfile.TemporaryDirectory(prefix="matcha-") as folder:
        path = plan_file or Path(folder) / "plan.json"
        if plan_file is None:
            plan.save(path)
        environment = {
            PLAN_VARIABLE: str(path.resolve()),
            COMMAND_VARIABLE: shlex.join(["matcha", *sys.argv[1:]]),
        }
        hosts = how.hosts
        if how.links:
            if hosts.number > 1:
                raise InputError("links across machines: start each worker with --peers, --rank.")
            environment |= local_links(plan.num_workers, Path(folder), how.keys)
        if watched is None or hosts.number > 1:
            launch(
                command,
                plan.num_workers,
                environment=environment,
                hosts=hosts,
                restarts=how.restarts,
            )
            return
        logs = watched / "logs"
        console.print(f"starting {plan.num_workers} workers; their words go to {logs}")
        launch(
            command,
            plan.num_workers,
            environment=environment,
            logs=logs,
            meanwhile=lambda ended: watch(watched, until=ended),
            restarts=how.restarts,
        )


def _report(directory: Path, keep: Keep, *, quiet: bool) -> None:
    from matcha.report import write_report

    with patient_progress("writing the report") as progress:
        page = keep(
            directory / "report.html",
            lambda path: write_report([directory], path, progress=progress),
        )
    if not quiet:
        console.print(f"report in [cyan]{page}[/]")


def _work(
    job: Job,
    network: Network,
    resume: bool,
    checkpoint_every: int,
    tensorboard: bool,
    *,
    quiet: bool,
) -> None:
    """Be one worker."""
    from matcha.distributed.launch.environment import worker_transport
    from matcha.distributed.worker import run_worker

    with worker_transport(job.plan.topology) as transport:
        show = None
        if transport.rank == 0:
            show = (lambda _: None) if quiet else _progress(job.settings.epochs)
            _show_links()
        records = run_worker(
            job,
            transport,
            network,
            resume=resume,
            checkpoint_every=checkpoint_every,
            tensorboard=tensorboard,
            on_record=show,
        )
    if show is not None and not records:
        raise InputError("there was nothing left to train: the run is at its last epoch already.")


def _progress(total: int) -> Callable[[Record], None]:
    def show(record: Record) -> None:
        parts = [f"epoch {record.epoch:g}/{total}", loss_in_words(record)]
        if record.test_accuracy is not None:
            parts.append(f"test accuracy {record.test_accuracy:.1%}")
        if record.consensus_distance is not None:
            parts.append(f"consensus distance {record.consensus_distance:.2e}")
        parts.append(f"{record.time:.1f} s")
        console.print("  ".join(parts), highlight=False)

    return show


def _check_task(name: str, momentum: str) -> None:
    from matcha.training.momentum import parse_momentum
    from matcha.zoo.recipes import recipe

    recipe(name)
    parse_momentum(momentum)


def _plan(
    plan_file: Path | None,
    topology: str,
    strategy: str,
    budget: float,
    seed: int,
    wire: str | None,
) -> PlanLike:
    from matcha.distributed.launch.launcher import PLAN_VARIABLE

    path = plan_file or os.environ.get(PLAN_VARIABLE)
    if path is not None:
        made = load_plan(path)
        if wire is not None and parse_wire(wire) != made.wire:
            raise InputError(
                f"the plan's messages hold {made.wire.name}: leave --wire out, or plan anew."
            )
        return made
    with patient_progress("planning") as progress:
        return make_plan(
            families.parse(topology),
            budget,
            strategy,
            seed,
            wire=wire or "float32",
            progress=progress,
        )
