"""`matcha demo`: the same training by every compared strategy, on real processes over slow links.

Eight processes start once and train scikit-learn's digits by one strategy after another, each to
the same training loss. Links are slowed down by emulation; everything else is real. Why the setting
is what it is stands in benchmarks/demo.py, which runs it over five seeds.
"""

from __future__ import annotations

import math
import pickle
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from matcha.cli import app
from matcha.cli import options as opt
from matcha.cli.help import Command
from matcha.cli.output import (
    check_writable,
    console,
    free_directory,
    keeping,
    make_folder,
    patient_progress,
    print_comparison,
    print_json,
)
from matcha.errors import InputError, require
from matcha.plans import Plan
from matcha.records import COMMAND_VARIABLE, Record, follow, has_diverged, invoked
from matcha.strategies import comparable, plan, strategy_with
from matcha.topology import Link, Topology, families

if TYPE_CHECKING:
    from matcha.distributed.train import Network
    from matcha.training.jobs import Job
    from matcha.training.task import Task

SMALL = "greedy-small"
"""The run of greedy over small messages."""
RUNS = ("silent", "allreduce", "local", "vanilla", "periodic", "matcha", "greedy", SMALL)
QUICK = ("allreduce", "vanilla", "greedy", SMALL)
_narrator = Console(stderr=True)
_POLL_SECONDS = 0.1
_MODEL_BITS = 32 * 301_066
_SLOW_LINKS: Mapping[Link, float] = {(1, 3): 10.0}  # of paper:er8, and by which factor
_NUM_TRAIN, _BATCH, _EPOCHS, _RATE = 800, 32, 100, 0.1


@app.command("demo", cls=Command)
def demo_command(
    context: typer.Context,
    quick: bool = typer.Option(
        False, "--quick", help="Half a minute: four strategies, a looser target, 4 s for each."
    ),
    link_mbps: float = typer.Option(
        200.0, help="Slow every link to this many Mbit/s. An emulation, by waiting."
    ),
    budget: float = opt.budget(0.1),
    target_loss: float = typer.Option(0.1, help="Train each strategy to this training loss."),
    seconds: float = typer.Option(
        15.0, "--time-limit", help="Give up on the target after this many seconds."
    ),
    topology: str = opt.TOPOLOGY,
    strategies: list[str] = opt.several("strategy", *RUNS),
    seed: int = opt.SEED,
    output: Path | None = opt.folder(),
    as_json: bool = opt.JSON,
    spec: Path | None = typer.Option(None, hidden=True),
) -> None:
    """See what a communication budget buys: train digits for real on 8 processes, by each strategy.

    Beside the plans for a budget stand what people run (allreduce as in DDP, local SGD), and
    silence, which shows what doing nothing would score; greedy-small is greedy over the messages
    that [cyan]matcha tune[/] would choose. Each worker sees a few of the ten digits. Of paper:er8
    the link 1-3 has a tenth of the others' speed. One seed: a demonstration only.

    Takes about two minutes on two cores. Training, processes and messages are real; the speed of
    the links is emulated. Everything is written below runs/, with a report for a browser.
    """
    from matcha.report import compare, load_runs

    if spec is not None:
        _work(spec)
        return
    require("torch")
    names = opt.words(strategies)
    if quick:
        if clash := opt.given(context, ["strategies", "target_loss", "seconds"]):
            raise InputError(f"--quick chooses {clash[0]}: leave one of the two out.")
        names, target_loss, seconds = list(QUICK), 0.3, 4.0
    for name, value in opt.taken(context, "link_mbps target_loss seconds").items():
        if not 0 < value < math.inf:
            raise InputError(f"{name} must be positive, not {value:g}.")
    if not names:
        raise InputError("the demo needs at least one strategy.")
    stem = datetime.now().strftime("demo-%Y%m%d-%H%M")
    directory = output or free_directory(Path("runs"), stem)
    if directory.is_dir() and any(directory.iterdir()):
        raise InputError(f"{str(directory)!r} is not empty: choose another --output.")
    check_writable(directory, directory)
    slower = _SLOW_LINKS if topology == "paper:er8" else {}
    with patient_progress("planning"):
        plans = make_plans(families.parse(topology), names, budget, link_mbps, slower, seed)
        jobs = make_jobs(directory, plans, target_loss, seed)
    make_folder(directory)  # only now: a demo that cannot start leaves none behind
    num_workers = jobs[0].plan.num_workers
    slow = "".join(f", link {i}-{j} at {link_mbps / by:g}" for (i, j), by in slower.items())
    small = f"{SMALL} sends {plans[SMALL].wire.name}. " if SMALL in plans else ""
    _narrator.print(
        f"Training digits on [bold]{num_workers} processes[/] ({topology}), each with a few of the "
        f"ten digits; links emulated at [bold]{link_mbps:g} Mbit/s[/]{slow}.\n"
        "vanilla talks over every link in every iteration, allreduce averages exactly; those with "
        f"a budget have [bold]{budget:.0%}[/] of vanilla's time, silent has none. {small}\n"
        f"Each trains until the average model's training loss holds {target_loss:g}, or for "
        f"{seconds:g} s. Starting the processes takes a moment.",
        highlight=False,
    )
    from matcha.distributed.train import Network

    bars, show = _bars(list(plans), target_loss, seconds)
    with bars:
        run_demo(directory, jobs, Network(link_mbps=link_mbps, slower=slower), seconds, show)
    runs = load_runs([job.folder for job in jobs])
    comparison = compare(runs, target_loss)
    with keeping() as results:
        heading = f"Digits on {num_workers} workers over {link_mbps:g} Mbit/s links"
        results.page(directory / "report.html", runs, title=heading, target_loss=target_loss)
        (page,) = results.written
        if as_json:
            print_json(comparison.to_json() | {"report": str(page)})
            return
        title = f"to training loss {target_loss:g}, links emulated at {link_mbps:g} Mbit/s"
        print_comparison(comparison, title)
        console.print(f"report: [cyan]{page}[/]  (open it in a browser; it needs no network)")


def make_plans(
    topology: Topology,
    names: Sequence[str],
    budget: float,
    link_mbps: float,
    slower: Mapping[Link, float],
    seed: int,
) -> dict[str, Plan]:
    """Plan every strategy, with the weight that is best for the error, as in comparisons."""
    from matcha.tuning import small_messages

    if topology.link_times is not None:
        raise InputError("the demo emulates its own links: give a topology without link times.")
    seconds = _MODEL_BITS / (1e6 * link_mbps)
    graph = topology.with_link_times([seconds * slower.get(e, 1.0) for e in topology.links])
    known = {name: comparable(strategy_with(name)) for name in names if name != SMALL}
    return {
        name: plan(graph, budget, known[name], seed)
        if name in known
        else small_messages(graph, budget, seed)
        for name in names
    }


def make_jobs(
    directory: Path, plans: Mapping[str, Plan], target_loss: float, seed: int
) -> list[Job]:
    """One run per plan: digits of which each worker sees a few, by a perceptron of 1.2 MB."""
    from matcha.training.jobs import Job
    from matcha.training.optimizers import SGD
    from matcha.training.rates import Constant
    from matcha.training.settings import Settings
    from matcha.training.task import TaskSpec

    num_workers = next(iter(plans.values())).num_workers
    settings = Settings(
        epochs=_EPOCHS,
        schedule=Constant(base=_RATE),
        optimizer=SGD(momentum=0.9, nesterov=True, weight_decay=1e-4),
        target_loss=target_loss,
    )
    choices = {"partition": "shards", "num_train": _NUM_TRAIN, "model": "perceptron"}
    task = TaskSpec(
        name="digits",
        seed=seed,
        choices={**choices, "batch_size": _BATCH},
        make=partial(_make_task, num_workers, seed),
    )
    return [
        Job(directory=directory / name, task=task, plan=made, settings=settings, name=name)
        for name, made in plans.items()
    ]


def _make_task(num_workers: int, seed: int) -> Task:
    from matcha.zoo.data import digits, partition
    from matcha.zoo.images import ImageTask
    from matcha.zoo.models import perceptron

    images = digits(_NUM_TRAIN)  # and many to test on
    parts = partition(images.train_labels, num_workers, "shards", seed=seed)
    model = partial(perceptron, images.num_classes)
    return ImageTask("digits", images, parts, model, batch_size=_BATCH, seed=seed)


def run_demo(
    directory: Path,
    jobs: Sequence[Job],
    network: Network,
    seconds: float,
    on_record: Callable[[str, Record], None] = lambda name, record: None,
) -> None:
    """Start the workers, follow them to the end, and leave none behind, whatever happens."""
    from matcha.distributed.launch.launcher import launch

    followers = {job.label: follow(job.folder) for job in jobs}

    def show() -> None:
        for name, records in followers.items():
            for record in next(records):
                on_record(name, record)

    def keep_showing(ended: Callable[[], bool]) -> None:
        while not ended():
            show()
            time.sleep(_POLL_SECONDS)

    with tempfile.TemporaryDirectory(prefix="matcha-") as folder:
        spec = Path(folder) / "demo"
        spec.write_bytes(pickle.dumps((jobs, network, seconds)))
        launch(
            ["-m", "matcha.cli", "demo", "--spec", str(spec)],
            jobs[0].plan.num_workers,
            environment={COMMAND_VARIABLE: invoked() or "matcha demo"},
            logs=directory / "logs",
            meanwhile=keep_showing,
        )
    show()


def _work(spec: Path) -> None:
    """One worker: train by every strategy in turn, within one process group."""
    from matcha.distributed.launch.placement import worker_transport
    from matcha.distributed.train import run_worker

    jobs, network, seconds = pickle.loads(spec.read_bytes())
    with worker_transport() as transport:
        for job in jobs:
            run_worker(job, transport, network, max_seconds=seconds)


def _bars(
    names: Sequence[str], target: float, seconds: float
) -> tuple[Progress, Callable[[str, Record], None]]:
    """A bar per strategy, and what fills them as losses fall to the target."""
    progress = Progress(
        TextColumn("{task.description:<12}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[words]}"),
        console=_narrator,
    )
    tasks = {name: progress.add_task(name, total=1.0, words="waiting") for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}

    def show(name: str, record: Record) -> None:
        loss = record.train_loss
        if loss is None or has_diverged(loss):
            progress.update(tasks[name], words="diverged")
            return
        losses[name].append(loss)
        first = max(losses[name][0], 2 * target)
        way = math.log(first / max(loss, target)) / math.log(first / target)
        words = f"epoch {record.epoch:.0f}  loss {loss:.3f}  {record.time:.1f} s"
        if len(losses[name]) > 1 and max(losses[name][-2:]) <= target:
            words += "  [green]reached[/]"
        elif record.epoch >= _EPOCHS or record.time >= seconds:
            words += "  [yellow]not reached[/]"
        progress.update(tasks[name], completed=way, words=words)

    return progress, show
