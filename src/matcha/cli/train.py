"""`matcha train`: a script or a built-in task on real workers."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from matcha.cli import app
from matcha.cli.output import console, patient_progress
from matcha.cli.plan import TOPOLOGY_HELP
from matcha.errors import InputError
from matcha.plans import AnyPlan, load_plan
from matcha.records import COMMAND_VARIABLE, Record
from matcha.strategies import plan as make_plan
from matcha.topology import families

if TYPE_CHECKING:
    from matcha.experiments.training import TaskTraining

PLAN_VARIABLE = "MATCHA_PLAN"
_WIRES = ("float16", "bfloat16")


@app.command("train", context_settings={"allow_interspersed_args": True})
def train_command(
    target: str = typer.Argument(
        ..., metavar="SCRIPT|TASK", help="Your training script (.py), or a task such as digits."
    ),
    arguments: list[str] = typer.Argument(None, help="The script's own arguments, after --."),
    topology: str = typer.Option("paper:er8", "--topology", "-t", help=TOPOLOGY_HELP),
    strategy: str = typer.Option("matcha", "--strategy", "-s", help="How the plan is made."),
    budget: float = typer.Option(0.5, "--budget", "-b", help="C_b in (0, 1]."),
    seed: int = typer.Option(0, help="Of the plan, the data's partition and the first weights."),
    plan_file: Path | None = typer.Option(
        None, "--plan", help="A saved plan instead of topology, strategy and budget."
    ),
    output: Path | None = typer.Option(
        None, "--output", "-o", help="The run's directory; by default below runs/."
    ),
    epochs: int | None = typer.Option(None, help="Task: how long; by default the recipe's."),
    learning_rate: float | None = typer.Option(None, "--learning-rate", "--lr", help="Task."),
    batch_size: int | None = typer.Option(None, help="Task: examples a worker and iteration."),
    model: str | None = typer.Option(None, help="Task: another model."),
    partition: str = typer.Option("iid", help="Task: iid, shards or dirichlet."),
    data: Path | None = typer.Option(None, help="Task: folder of the data sets."),
    target_loss: float | None = typer.Option(None, help="Task: stop at this training loss."),
    overlap: bool = typer.Option(
        False, "--overlap", help="Task: exchange while the gradient is computed."
    ),
    wire: str | None = typer.Option(None, help="Task: send float16 or bfloat16 values."),
    link_mbps: float | None = typer.Option(
        None, help="Task: slow links to this many Mbit/s. An emulation, by waiting."
    ),
    deadline: float = typer.Option(300.0, help="Task: seconds before a silent worker is an error."),
    checkpoint_every: int = typer.Option(0, help="Task: epochs between checkpoints; 0: none."),
    resume: bool = typer.Option(False, "--resume", help="Task: go on from the newest checkpoint."),
    tensorboard: bool = typer.Option(False, "--tensorboard", help="Task: also write event files."),
    watch: bool = typer.Option(False, "--watch", help="Task: a live dashboard instead of lines."),
    report: bool = typer.Option(True, help="Task: write a page for the browser at the end."),
    hosts: int = typer.Option(1, help="Machines that take part, each running this command."),
    rendezvous: str | None = typer.Option(
        None, help="HOST:PORT of one of several machines, where they meet."
    ),
    host_rank: int | None = typer.Option(
        None, help="This machine's number, from 0, which is the one at --rendezvous."
    ),
) -> None:
    """Train decentralized on real workers, one process each.

    A script is started once a worker, as `torchrun` would, with the plan's path in
    [cyan]$MATCHA_PLAN[/]; it needs one line of its own: [cyan]Gossip(model, optimizer, plan)[/].
    A task is complete: data, model, optimizer, records, checkpoints.

    Under another launcher (torchrun, srun, mpirun) this command is one worker and starts no others.

    [bold]Examples[/]

      matcha train digits --strategy greedy --budget 0.3 --epochs 5

      matcha train my_script.py --topology ring:4 -- --batch-size 64

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
        _check_task(target, wire)
    plan = _plan(plan_file, topology, strategy, budget, seed)
    if is_script:
        _launch([target, *(arguments or [])], plan, plan_file, hosts, rendezvous, host_rank)
        return
    directory = output or _run_directory(target, plan)
    if not is_worker():
        if (directory / "run.json").exists() and not resume:
            raise InputError(f"{str(directory)!r} already holds a run: choose another --output.")
        watched = directory if watch and hosts == 1 else None
        command = _command_line(directory)
        _launch(command, plan, plan_file, hosts, rendezvous, host_rank, watched)
        if report and (directory / "run.json").exists():
            _report(directory)
        console.print(f"records in [cyan]{directory}[/]")
        return

    import torch

    from matcha.experiments.training import TaskTraining
    from matcha.tasks.recipes import Choices

    choices = Choices(
        num_workers=plan.num_workers,
        data=data,
        model=model,
        batch_size=batch_size,
        partition=partition,  # type: ignore[arg-type]
        seed=seed,
    )
    request = TaskTraining(
        task=target,
        choices=choices,
        epochs=epochs,
        learning_rate=learning_rate,
        overlap=overlap,
        wire_dtype=getattr(torch, wire) if wire else None,
        deadline=deadline,
        link_mbps=link_mbps,
        target_loss=target_loss,
        directory=directory,
        name=directory.name,
        resume=resume,
        checkpoint_every=checkpoint_every,
        tensorboard=tensorboard,
    )
    _work(request, plan)


# -- launching -------------------------------------------------------------------------------------


def is_worker() -> bool:
    """Whether a launcher (torchrun, srun with PMI, mpirun) started this process as one of many."""
    return "RANK" in os.environ or "PMI_RANK" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ


def _command_line(directory: Path) -> list[str]:
    """This very command, told where to write: each worker runs it again."""
    return ["-m", "matcha.cli", *sys.argv[1:], "--output", str(directory)]


def _launch(
    command: list[str],
    plan: AnyPlan,
    plan_file: Path | None,
    hosts: int,
    rendezvous: str | None,
    host_rank: int | None,
    watched: Path | None = None,
) -> None:
    """Start the workers of this machine and wait for them; exit as they did."""
    if (hosts > 1) != (rendezvous is not None):
        raise InputError("several machines need both --hosts and --rendezvous HOST:PORT.")
    if plan.num_workers % hosts:
        raise InputError(f"{plan.num_workers} workers cannot be split evenly over {hosts} hosts.")
    here = plan.num_workers // hosts
    with tempfile.TemporaryDirectory(prefix="matcha-") as folder:
        path = plan_file or Path(folder) / "plan.json"
        if plan_file is None:
            plan.save(path)
            if command[0] == "-m":
                command = [*command, "--plan", str(path)]
        environment = {
            PLAN_VARIABLE: str(path.resolve()),
            COMMAND_VARIABLE: shlex.join(["matcha", *sys.argv[1:]]),
        }
        if rendezvous is not None:
            code = _torchrun(command, here, hosts, rendezvous, host_rank, environment)
        else:
            code = _local(command, here, environment, watched)
    if code:
        raise typer.Exit(code)


def _local(
    command: list[str], num_workers: int, environment: dict[str, str], watched: Path | None
) -> int:
    from matcha.distributed.launch import run_local

    command = [sys.executable, *command]
    if watched is not None:
        codes = _under_watch(command, num_workers, environment, watched)
    else:
        codes = run_local(command, num_workers, environment=environment)
    return next((code if code > 0 else 128 - code for code in codes if code), 0)


def _under_watch(
    command: list[str], num_workers: int, environment: dict[str, str], directory: Path
) -> list[int]:
    """Run the workers with their words in files and the run's directory on the screen."""
    from matcha.distributed.launch import LocalWorkers
    from matcha.report.watch import watch

    folder = directory / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        logs = [
            stack.enter_context((folder / f"worker-{rank}.log").open("w", encoding="utf-8"))
            for rank in range(num_workers)
        ]
        workers = stack.enter_context(
            LocalWorkers(command, num_workers, environment=environment, outputs=logs)
        )
        console.print(f"starting {num_workers} workers; their words go to {folder}")
        watch(directory, until=lambda: None not in {p.poll() for p in workers.processes})
        codes = workers.wait()
    for rank, code in enumerate(codes):
        if code:
            last = (folder / f"worker-{rank}.log").read_text(encoding="utf-8").strip()
            console.print(f"worker {rank}: {last.splitlines()[-1] if last else 'no words'}")
    return codes


def _report(directory: Path) -> None:
    from matcha.report import write_report

    with patient_progress("writing the report") as progress:
        page = directory / "report.html"
        write_report([directory], page, sweep_seconds=2, progress=progress)
    console.print(f"report in [cyan]{page}[/]")


def _torchrun(
    command: list[str],
    here: int,
    hosts: int,
    rendezvous: str,
    host_rank: int | None,
    environment: dict[str, str],
) -> int:
    from torch.distributed.run import main as torchrun

    os.environ.update(environment)
    module = ["--module", command[1], *command[2:]] if command[0] == "-m" else command
    if host_rank is None:
        meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={rendezvous}"]
    else:
        address, _, port = rendezvous.rpartition(":")
        meeting = [f"--node-rank={host_rank}", f"--master-addr={address}", f"--master-port={port}"]
    torchrun([f"--nnodes={hosts}", f"--nproc-per-node={here}", *meeting, *module])
    return 0


# -- one worker ------------------------------------------------------------------------------------


def _work(request: TaskTraining, plan: AnyPlan) -> None:
    import torch

    from matcha.distributed import default_transport
    from matcha.experiments.training import run_worker

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    transport = default_transport()
    show = _progress(request) if transport.rank == 0 else None
    records = run_worker(request, plan, transport, show)
    transport.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if show is not None and not records:
        raise InputError("there was nothing left to train: the run is at its last epoch already.")


def _progress(request: TaskTraining) -> Callable[[Record], None]:
    from matcha.tasks.recipes import recipe

    total = request.epochs or recipe(request.task).epochs

    def show(record: Record) -> None:
        parts = [f"epoch {record.epoch:g}/{total}", f"loss {record.train_loss:.4f}"]
        if record.test_accuracy is not None:
            parts.append(f"test accuracy {record.test_accuracy:.1%}")
        if record.consensus_distance is not None:
            parts.append(f"consensus distance {record.consensus_distance:.2e}")
        parts.append(f"{record.time:.1f} s")
        console.print("  ".join(parts), highlight=False)

    return show


# -- what was asked for ----------------------------------------------------------------------------


def _check_task(name: str, wire: str | None) -> None:
    from matcha.tasks.recipes import recipe

    recipe(name)
    if wire is not None and wire not in _WIRES:
        raise InputError(f"--wire is {wire!r}, but it is float16 or bfloat16.")


def _plan(
    plan_file: Path | None, topology: str, strategy: str, budget: float, seed: int
) -> AnyPlan:
    path = plan_file or os.environ.get(PLAN_VARIABLE)
    if path is not None:
        return load_plan(path)
    with patient_progress("planning"):
        return make_plan(families.parse(topology), budget, strategy, seed)


def _run_directory(target: str, plan: AnyPlan) -> Path:
    stem = f"{target}-{plan.strategy}-{plan.budget:g}"
    for number in range(1, 10_000):
        path = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
        if not path.exists():
            return path
    raise InputError(f"runs/ is full of {stem}: clear it or choose --output.")
