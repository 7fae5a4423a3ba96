"""`matcha train`: a script or a built-in task on real workers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import typer

from matcha.cli import app
from matcha.cli import options as opt
from matcha.cli.help import Command
from matcha.cli.output import (
    console,
    free_directory,
    keeping,
    patient_progress,
    print_json,
    serving,
)
from matcha.errors import InputError
from matcha.plans import PlanLike, load_plan
from matcha.records import Record, holds_run, read_run
from matcha.strategies import plan as make_plan
from matcha.topology import families
from matcha.wires import parse_wire

_TASK_OPTIONS = (
    "epochs", "learning_rate", "batch_size", "momentum", "model", "partition", "worker_weights",
    "data", "target_loss", "overlap", "link_mbps", "clip", "timeout", "checkpoint_every", "resume",
    "tensorboard", "watch", "serve", "output", "report", "as_json",
)  # fmt: skip
_PLANNING = ("topology", "strategy", "budget", "worker_weights")
_STARTING = (*_PLANNING, "wire", "plan_file", "peers", "hosts", "resume")


@app.command("train", cls=Command, context_settings={"allow_interspersed_args": True})
def train_command(
    context: typer.Context,
    target: str = typer.Argument(
        ..., metavar="SCRIPT|TASK", help="Your training script (.py), or a task such as digits."
    ),
    arguments: list[str] = typer.Argument(None, help="The script's own arguments, after --."),
    topology: str = opt.TOPOLOGY,
    strategy: str = opt.STRATEGY,
    budget: float = opt.budget(0.5),
    wire: str | None = opt.WIRE_OR_PLANS,
    seed: int = opt.SEED,
    plan_file: Path | None = typer.Option(
        None, "--plan", help="A saved plan instead of topology, strategy and budget."
    ),
    output: Path | None = opt.folder(),
    epochs: int | None = opt.EPOCHS,
    learning_rate: float | None = opt.LEARNING_RATE,
    batch_size: int | None = opt.BATCH_SIZE,
    momentum: str = opt.MOMENTUM,
    model: str | None = opt.MODEL,
    partition: str = opt.PARTITION,
    worker_weights: str | None = opt.WEIGHTS_OR_DATA,
    data: Path | None = opt.DATA,
    target_loss: float | None = typer.Option(None, help="Task: stop at this training loss."),
    overlap: bool = opt.OVERLAP,
    link_mbps: float | None = typer.Option(
        None, help="Task: slow links to this many Mbit/s. An emulation, by waiting."
    ),
    clip: float | None = opt.CLIP,
    timeout: float | None = opt.TIMEOUT_OR_NONE,
    checkpoint_every: int = typer.Option(0, help="Task: epochs between checkpoints; 0: none."),
    resume: bool = opt.RESUME,
    tensorboard: bool = typer.Option(False, "--tensorboard", help="Task: also write event files."),
    watch: bool = typer.Option(False, "--watch", help="Task: a live dashboard instead of lines."),
    serve: str | None = opt.SERVE,
    report: bool = opt.REPORT,
    hosts: int = typer.Option(1, help="Machines that take part, each running this command."),
    rendezvous: str | None = typer.Option(
        None, help="HOST:PORT of one of several machines, where they meet."
    ),
    host_rank: int | None = typer.Option(
        None, help="This machine's number, from 0, which is the one at --rendezvous."
    ),
    links: bool = typer.Option(
        False, "--links", help="Workers talk over connections of their own, one per link."
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
    join: str | None = typer.Option(
        None,
        help="HOST:PORT of any worker of a running --elastic team: be one more of its workers.",
    ),
    listen: str | None = typer.Option(
        None, help="With --join: HOST:PORT at which others reach it; by default a free port."
    ),
    elastic: bool = typer.Option(
        False, "--elastic", help="Links: go on without a lost worker; local ones start again."
    ),
    restarts: int = typer.Option(10, help="With --elastic: how often a worker is started again."),
    replan: int = typer.Option(
        0,
        min=0,
        help="Iterations between new plans, made where link times have changed; 0: never.",
    ),
    as_json: bool = opt.JSON,
) -> None:
    """Train decentralized on real workers, one process each.

    A script is started once per worker, as `torchrun` would, with the plan's path in
    [cyan]$MATCHA_PLAN[/]; it needs one line of its own: [cyan]Gossip(model, optimizer, plan)[/].
    A task is complete: data, model, optimizer, records, checkpoints.

    Under another launcher (torchrun, srun, mpirun) or with --peers this command is one worker and
    starts no others. With --elastic the team outlives its workers: one that dies is left out, and
    taken in again with a neighbour's state when it comes back. Others may --join it while it
    trains, with a certificate of its keys or the token in [cyan]$MATCHA_TOKEN[/]; SIGUSR1 lets a
    worker leave for good.

    [bold]Examples[/]

      matcha train digits --strategy greedy --budget 0.3 --epochs 5

      matcha train digits -s greedy -b 0.02 --wire modulo:3

      matcha train my_script.py --topology ring:4 -- --batch-size 64

      matcha train digits --elastic --keys keys

      matcha train digits --plan plan.json --peers peers --rank 3 --keys keys

      matcha train digits --join host0:29600 --keys keys --rank 8

      torchrun --nproc-per-node=8 -m matcha.cli train digits --plan plan.json
    """
    is_script = target.endswith(".py")
    if is_script:
        if not Path(target).is_file():
            raise InputError(f"there is no script {target!r}.")
    elif arguments:
        raise InputError(f"a task takes no arguments of its own: {' '.join(arguments)!r}.")
    else:
        from matcha.training.momentum import parse_momentum
        from matcha.zoo.recipes import recipe

        chosen = recipe(target)
        parse_momentum(momentum)
    if resume and output is None:
        raise InputError("--resume needs --output: the directory of the run to go on with.")
    if rank is not None and peers is None and join is None:
        raise InputError("--rank needs --peers or --join: who the other workers are.")
    if listen is not None and join is None:
        raise InputError("--listen needs --join: a worker of a start has its address in --peers.")
    for applies, names, why in (
        (is_script, _TASK_OPTIONS, "tasks: a script trains by itself: give it its own after --."),
        (plan_file, _PLANNING, "planning: a saved plan has its own; leave --plan out."),
        (not elastic, ["restarts"], "--elastic: other teams end with their first loss."),
        (hosts > 1, ["watch"], "one machine: use `matcha watch` beside the run."),
        (join, _STARTING, "a start: one that joins takes the team's plan and state; leave it out."),
    ):
        if applies:
            opt.refuse(context, names, f"for {why}")
    from matcha.distributed.launch import placement
    from matcha.distributed.launch.launcher import Hosts
    from matcha.distributed.launch.main import show_links
    from matcha.distributed.train import Network, launch_script, train_job

    has_links = links or elastic or peers or join or placement.LinkAddress.from_environment()
    if keys is not None and not has_links:
        raise InputError("--keys needs --links, --elastic or --peers: other links have no keys.")
    if join is not None and is_script:  # go on as the script, which joins by its line `Gossip(…)`
        given = {
            placement.JOIN_VARIABLE: join,
            placement.LISTEN_VARIABLE: listen,
            placement.KEYS_VARIABLE: keys and keys.resolve(),
            "RANK": rank,
        }
        environment = {name: str(value) for name, value in given.items() if value is not None}
        command = [sys.executable, target, *(arguments or [])]
        os.execve(sys.executable, command, {**os.environ, **environment})
    joining = None if join is None else placement.ask_to_join(join, keys, rank, listen)
    address = None if peers is None else placement.LinkAddress(peers=peers, rank=rank, keys=keys)
    network = Network(
        **opt.taken(context, "timeout link_mbps keys"),
        on_loss="continue" if elastic else None,
        restarts=restarts if elastic else 0,
        replan=replan or None,
        links=links or elastic,
        hosts=Hosts(number=hosts, rendezvous=rendezvous, rank=host_rank),
        address=address,
        joining=joining,
    )
    if is_script:
        plan = _plan(plan_file, topology, strategy, budget, seed, wire)
        launch_script([target, *(arguments or [])], plan, network, plan_file)
        return
    from matcha.training.jobs import Job, stem
    from matcha.zoo.recipes import Choices

    how = "epochs learning_rate clip momentum overlap target_loss"
    settings = chosen.settings(**opt.taken(context, how))
    one_of_many = joining is not None or placement.is_worker(address)
    if output is not None and not one_of_many and not host_rank:
        # Before anything is planned: nothing to go on with, or a run that would be written over.
        if resume and not holds_run(output):
            raise InputError(
                f"{str(output)!r} holds no run to go on with: leave --resume out to start one."
            )
        if not resume and holds_run(output):
            raise InputError(
                f"{str(output)!r} already holds a run: choose another --output, or --resume it"
            )
    if resume and plan_file is None and output is not None:
        plan_file = output / "plan.json"
    if joining is not None:
        plan = joining.given
    else:
        plan = _plan(plan_file, topology, strategy, budget, seed, wire)
    own = opt.taken(context, "data model batch_size partition")
    spec = chosen.spec(Choices(num_workers=plan.num_workers, seed=seed, **own))
    plan = opt.weighted(plan, worker_weights, spec)
    directory = output or free_directory(Path("runs"), f"{target.replace(':', '.')}-{stem(plan)}")
    job = Job(directory=directory, task=spec, plan=plan, settings=settings, name=directory.name)
    ranked = os.environ.get("RANK")
    if one_of_many and (peers is not None or join is not None or ranked in (None, "0")):
        show_links()
    number = (rank if ranked is None else ranked) if one_of_many else host_rank or 0
    if serve is not None and number is None:
        raise InputError("--serve needs a launcher that sets RANK: the first worker serves.")

    try:
        with serving(directory, serve if str(number) == "0" else None):
            train_job(
                job,
                network,
                **opt.taken(context, "resume checkpoint_every tensorboard"),
                live=serve is not None,
                on_record=None if as_json or watch else partial(show_record, settings.epochs),
                meanwhile=partial(_watch, directory) if watch else None,
            )
    except KeyboardInterrupt:
        if not one_of_many:
            typer.echo(f"matcha: stopped; {_how_to_go_on(directory)}", err=True)
        raise typer.Exit(130) from None
    if one_of_many:
        return
    with keeping() as results:
        if report and holds_run(directory):
            results.page(directory / "report.html", [directory])
        if as_json:
            from matcha.report import compare

            print_json(compare([read_run(directory)]).to_json())
            return
        for page in results.written:
            console.print(f"report in [cyan]{page}[/]")
        console.print(f"records in [cyan]{directory}[/]")


def _how_to_go_on(directory: Path) -> str:
    """What to type after Ctrl-C; without a checkpoint, how to have one the next time."""
    from matcha.distributed.checkpoint import checkpoints
    from matcha.distributed.recorder import CHECKPOINTS

    if checkpoints(directory / CHECKPOINTS):
        return f"the same command with --output {directory} --resume goes on from there."
    return "without --checkpoint-every there is nothing that --resume could go on from."


def _watch(directory: Path, ended: Callable[[], bool]) -> None:
    from matcha.report.watch import watch

    console.print(f"what workers print goes to {directory / 'logs'}")
    watch(directory, until=ended)


def show_record(epochs: int, record: Record) -> None:
    """Print a line about a record, in the worker that made it."""
    from matcha.report import words

    console.print(words.record_line(record, epochs), highlight=False)


def _plan(
    plan_file: Path | None, topology: str, strategy: str, budget: float, seed: int, wire: str | None
) -> PlanLike:
    if plan_file is not None:
        made = load_plan(plan_file)
        if wire is not None and parse_wire(wire) != made.wire:
            raise InputError(
                f"the plan's messages hold {made.wire.name}: leave --wire out, or plan again."
            )
        return made
    graph = families.parse(topology)
    with patient_progress("planning") as progress:
        return make_plan(graph, budget, strategy, seed, wire=wire or "float32", progress=progress)
