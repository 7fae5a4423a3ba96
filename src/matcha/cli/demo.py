"""`matcha demo`: the same training by every compared strategy, on real processes over slow links.

Eight processes start once and train scikit-learn's digits by one strategy after another, each to
the same training loss. Links are slowed down by emulation; everything else is real. Why the setting
is what it is stands in benchmarks/demo.py, which runs it over five seeds.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
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
    console,
    free_directory,
    keeping,
    make_folder,
    patient_progress,
    print_comparison,
    print_json,
)
from matcha.errors import InputError, require
from matcha.plans import Plan, check_budget
from matcha.records import COMMAND_VARIABLE, Record, follow, has_diverged, invoked
from matcha.strategies import comparable, plan, strategy_with
from matcha.topology import Link, families

_narrator = Console(stderr=True)
_POLL_SECONDS = 0.1
_MODEL_BITS = 32 * 301_066
_SLOW_LINK = (1, 3, 10.0)
_NUM_TRAIN, _BATCH = 800, 32

if TYPE_CHECKING:
    from matcha.training.task import Task

SMALL = "greedy-small"
"""The run of greedy over small messages."""
RUNS = ("silent", "allreduce", "local", "vanilla", "periodic", "matcha", "greedy", SMALL)
QUICK = ("allreduce", "vanilla", "greedy", SMALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """What the demo trains, and on what network."""

    directory: Path
    topology: str = "paper:er8"
    runs: tuple[str, ...] = RUNS
    """Strategies, and `SMALL`."""
    budget: float = 0.1
    """C_b of every strategy that has one."""
    link_mbps: float = 200.0
    """The speed that links are emulated to have."""
    slow_links: tuple[tuple[int, int, float], ...] = ()
    """Links that are slower than that, by a factor each."""
    target_loss: float = 0.1
    seconds: float = 15.0
    """Give up on the target after this time on the run's clock."""
    epochs: int = 100
    """Or after this many epochs."""
    learning_rate: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("link_mbps", "target_loss", "seconds", "epochs"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"{name} must be positive, not {getattr(self, name):g}.")
        if not self.runs:
            raise InputError("the demo needs at least one strategy.")

    @classmethod
    def read(cls, path: Path) -> Demo:
        """Read what `run_demo` wrote for the workers."""
        document = json.loads(path.read_text(encoding="utf-8"))
        runs, directory = tuple(document.pop("runs")), Path(document.pop("directory"))
        slow = tuple((i, j, factor) for i, j, factor in document.pop("slow_links"))
        return cls(runs=runs, directory=directory, slow_links=slow, **document)

    @property
    def slower(self) -> dict[Link, float]:
        """The slow links' factors."""
        return {(i, j): factor for i, j, factor in self.slow_links}

    def run_directory(self, name: str) -> Path:
        """Where a strategy's run is recorded."""
        return self.directory / name

    def plan_file(self, name: str) -> Path:
        """Where a strategy's plan waits for the workers."""
        return self.directory / "plans" / f"{name}.json"


def make_plans(demo: Demo) -> dict[str, Plan]:
    """Plan every strategy and leave the plans where the workers find them."""
    from matcha.tuning import small_messages

    topology = families.parse(demo.topology)
    if topology.link_times is None:
        seconds = _MODEL_BITS / (1e6 * demo.link_mbps)
        times = [seconds * demo.slower.get(link, 1.0) for link in topology.links]
        topology = topology.with_link_times(times)
    plans = {}
    for name in demo.runs:
        # Every strategy with the weight that is best for the error, as in comparisons.
        plans[name] = (
            small_messages(topology, demo.budget, demo.seed)
            if name == SMALL
            else plan(topology, demo.budget, comparable(strategy_with(name), "error"), demo.seed)
        )
        demo.plan_file(name).parent.mkdir(parents=True, exist_ok=True)
        plans[name].save(demo.plan_file(name))
    return plans


def run_demo(
    demo: Demo, num_workers: int, on_record: Callable[[str, Record], None] | None = None
) -> None:
    """Start the workers, follow them to the end, and leave none behind, whatever happens.

    Args:
        demo: What to train; its plans are made already.
        num_workers: How many processes.
        on_record: Called with a strategy and each of its records as they come.

    Raises:
        WorkerError: A worker failed; its last words are in the message.
        ExchangeError: A worker was lost.
    """
    from matcha.distributed.launch.launcher import launch

    spec = demo.directory / "demo.json"
    spec.write_text(json.dumps(asdict(demo), default=str) + "\n", encoding="utf-8")
    followers = {name: follow(demo.run_directory(name)) for name in demo.runs}

    def show(ended: Callable[[], bool]) -> None:
        while not ended():
            _follow(followers, on_record)
            time.sleep(_POLL_SECONDS)

    launch(
        ["-m", "matcha.cli", "demo", "--spec", str(spec)],
        num_workers,
        environment={COMMAND_VARIABLE: invoked() or "matcha demo"},
        logs=demo.directory / "logs",
        meanwhile=show,
    )
    _follow(followers, on_record)


def _work(demo: Demo) -> None:
    """One worker: train by every strategy in turn, within one process group."""
    from matcha.distributed.launch.placement import worker_transport
    from matcha.distributed.train import Network, run_worker
    from matcha.training.jobs import Job
    from matcha.training.optimizers import SGD
    from matcha.training.rates import Constant
    from matcha.training.settings import Settings
    from matcha.training.task import TaskSpec

    settings = Settings(
        epochs=demo.epochs,
        schedule=Constant(base=demo.learning_rate),
        optimizer=SGD(momentum=0.9, nesterov=True, weight_decay=1e-4),
        target_loss=demo.target_loss,
    )
    network = Network(link_mbps=demo.link_mbps, slower=demo.slower)
    with worker_transport() as transport:
        for name in demo.runs:
            made = Plan.load(demo.plan_file(name))
            choices = {"partition": "shards", "num_train": _NUM_TRAIN, "model": "perceptron"}
            task = TaskSpec(
                name="digits",
                seed=demo.seed,
                choices={**choices, "batch_size": _BATCH},
                make=partial(_make_task, made.num_workers, demo.seed),
            )
            job = Job(
                directory=demo.run_directory(name),
                task=task,
                plan=made,
                settings=settings,
                name=name,
            )
            run_worker(job, transport, network, max_seconds=demo.seconds)


def _make_task(num_workers: int, seed: int) -> Task:
    """Digits of which each worker sees a few, and many to test on; a perceptron of 1.2 MB."""
    from matcha.zoo.data import digits, partition
    from matcha.zoo.images import ImageTask
    from matcha.zoo.models import perceptron

    images = digits(_NUM_TRAIN)
    parts = partition(images.train_labels, num_workers, "shards", seed=seed)
    model = partial(perceptron, images.num_classes)
    return ImageTask("digits", images, parts, model, batch_size=_BATCH, seed=seed)


def _follow(
    followers: Mapping[str, Iterator[list[Record]]],
    on_record: Callable[[str, Record], None] | None,
) -> None:
    for strategy, records in followers.items():
        for record in next(records):
            if on_record is not None:
                on_record(strategy, record)


@app.command("demo", cls=Command)
def demo_command(
    context: typer.Context,
    quick: bool = typer.Option(
        False, "--quick", help="Half a minute: four strategies, a looser target, 4 s for each."
    ),
    link_mbps: float = typer.Option(
        200.0, help="Slow every link to this many Mbit/s. An emulation, by waiting."
    ),
    budget: opt.Budget = 0.1,
    target_loss: float = typer.Option(0.1, help="Train each strategy to this training loss."),
    seconds: float = typer.Option(
        15.0, "--time-limit", help="Give up on the target after this many seconds."
    ),
    topology: opt.TopologyOption = "paper:er8",
    strategies: opt.Strategies = list(RUNS),
    seed: opt.Seed = 0,
    output: opt.FolderOrNone = None,
    as_json: opt.Json = False,
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
        _work(Demo.read(spec))
        return
    require("torch")  # which only the workers import
    names = tuple(opt.words(strategies))
    if quick:
        if clash := opt.given(context, ["strategies", "target_loss", "seconds"]):
            raise InputError(f"--quick chooses {clash[0]}: leave one of the two out.")
        names, target_loss, seconds = QUICK, 0.3, 4.0
    stem = datetime.now().strftime("demo-%Y%m%d-%H%M")
    directory = output or free_directory(Path("runs"), stem)
    if directory.is_dir() and any(directory.iterdir()):
        raise InputError(f"{str(directory)!r} is not empty: choose another --output.")
    demo = Demo(
        directory=directory,
        topology=topology,
        runs=names,
        budget=budget,
        link_mbps=link_mbps,
        slow_links=(_SLOW_LINK,) if topology == "paper:er8" else (),
        target_loss=target_loss,
        seconds=seconds,
        seed=seed,
    )
    with patient_progress("planning"):
        if families.parse(topology).link_times is not None:
            raise InputError("the demo emulates its own links: give a topology without link times.")
        for name in names:
            if name != SMALL:
                strategy_with(name)
        check_budget(budget)
        make_folder(directory)  # only now: a demo that cannot start leaves none behind
        plans = make_plans(demo)
    _announce(demo, plans)
    num_workers = next(iter(plans.values())).num_workers
    bars = _Bars(demo)
    with bars.progress:
        run_demo(demo, num_workers, bars.show)
    runs = load_runs([demo.run_directory(name) for name in names])
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


def _announce(demo: Demo, plans: Mapping[str, Plan]) -> None:
    slow = "".join(f", link {i}-{j} at {demo.link_mbps / by:g}" for i, j, by in demo.slow_links)
    small = f"{SMALL} sends {plans[SMALL].wire.name}. " if SMALL in plans else ""
    _narrator.print(
        f"Training digits on [bold]{next(iter(plans.values())).num_workers} processes[/] "
        f"({demo.topology}), each with a few of the ten digits; "
        f"links emulated at [bold]{demo.link_mbps:g} Mbit/s[/]{slow}.\n"
        "vanilla talks over every link in every iteration, allreduce averages exactly; those with "
        f"a budget have [bold]{demo.budget:.0%}[/] of vanilla's time, silent has none. {small}\n"
        f"Each trains until the average model's training loss holds {demo.target_loss:g}, or for "
        f"{demo.seconds:g} s. Starting the processes takes a moment.",
        highlight=False,
    )


class _Bars:
    """A bar a strategy, which fills as the loss falls to the target."""

    def __init__(self, demo: Demo) -> None:
        self._demo = demo
        self._first: dict[str, float] = {}
        self._before: dict[str, float] = {}
        self.progress = Progress(
            TextColumn("{task.description:<12}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[words]}"),
            console=_narrator,
        )
        self._tasks = {
            name: self.progress.add_task(name, total=1.0, words="waiting") for name in demo.runs
        }

    def show(self, strategy: str, record: Record) -> None:
        loss, target = record.train_loss, self._demo.target_loss
        if loss is None or has_diverged(loss):
            self.progress.update(self._tasks[strategy], words="diverged")
            return
        first = self._first.setdefault(strategy, max(loss, 2 * target))
        way = math.log(first / max(loss, target)) / math.log(first / target)
        words = f"epoch {record.epoch:.0f}  loss {loss:.3f}  {record.time:.1f} s"
        held = self._before.get(strategy, math.inf) <= target and loss <= target
        self._before[strategy] = loss
        if held:
            words += "  [green]reached[/]"
        elif record.epoch >= self._demo.epochs or record.time >= self._demo.seconds:
            words += "  [yellow]not reached[/]"
        self.progress.update(self._tasks[strategy], completed=way, words=words)
