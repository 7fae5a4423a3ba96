"""`matcha demo`: the same training by every compared strategy, on real processes over slow links.

Eight processes start once and train scikit-learn's digits by one strategy after another, each to
the same training loss. Links are slowed down by emulation; everything else is real.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from matcha.cli import app
from matcha.cli import options as opt
from matcha.cli.help import Command
from matcha.cli.output import (
    console,
    free_directory,
    keeping,
    make_folder,
    patient_progress,
    print_json,
)
from matcha.errors import InputError, require
from matcha.plans import Plan, check_budget
from matcha.records import COMMAND_VARIABLE, Record, follow, has_diverged, invoked
from matcha.strategies import COMPARED, has_budget, plan, strategy_named
from matcha.topology import families

_narrator = Console(stderr=True)
_NAMES = 12  # what a column of names takes of a line
_POLL_SECONDS = 0.1

if TYPE_CHECKING:
    from matcha.report import Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """What the demo trains, and on what network."""

    directory: Path
    topology: str = "paper:er8"
    strategies: tuple[str, ...] = COMPARED
    budget: float = 0.2
    """C_b of every strategy but vanilla."""
    link_mbps: float = 2.5
    """The speed that links are emulated to have."""
    target_loss: float = 0.025
    epochs: int = 20
    """Give up on the target after so many."""
    learning_rate: float | None = None
    batch_size: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("link_mbps", "target_loss", "epochs"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"{name} must be positive, not {getattr(self, name):g}.")
        if not self.strategies:
            raise InputError("the demo needs at least one strategy.")

    @classmethod
    def read(cls, path: Path) -> Demo:
        """Read what `run_demo` wrote for the workers."""
        document = json.loads(path.read_text(encoding="utf-8"))
        strategies, directory = tuple(document.pop("strategies")), Path(document.pop("directory"))
        return cls(strategies=strategies, directory=directory, **document)

    def run_directory(self, strategy: str) -> Path:
        """Where a strategy's run is recorded."""
        return self.directory / strategy

    def plan_file(self, strategy: str) -> Path:
        """Where a strategy's plan waits for the workers."""
        return self.directory / "plans" / f"{strategy}.json"


def make_plans(demo: Demo) -> dict[str, Plan]:
    """Plan every strategy and leave the plans where the workers find them."""
    topology = families.parse(demo.topology)
    plans = {}
    for strategy in demo.strategies:
        budget = demo.budget if has_budget(strategy) else 1.0
        plans[strategy] = plan(topology, budget, strategy, demo.seed)
        demo.plan_file(strategy).parent.mkdir(parents=True, exist_ok=True)
        plans[strategy].save(demo.plan_file(strategy))
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
    followers = {strategy: follow(demo.run_directory(strategy)) for strategy in demo.strategies}

    def show(ended: Callable[[], bool]) -> None:
        while not ended():
            _follow(followers, on_record)
            time.sleep(_POLL_SECONDS)

    launch(
        ["-m", "matcha.cli.demo_worker", str(spec)],
        num_workers,
        environment={COMMAND_VARIABLE: invoked() or "matcha demo"},
        logs=demo.directory / "logs",
        meanwhile=show,
    )
    _follow(followers, on_record)


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
    link_mbps: float = typer.Option(
        2.5, help="Slow every link to this many Mbit/s. An emulation, by waiting."
    ),
    budget: opt.Budget = 0.2,
    target_loss: float = typer.Option(0.025, help="Train each strategy to this training loss."),
    epochs: int = typer.Option(
        20, "--epochs", "-e", help="Give up on the target after so many epochs."
    ),
    topology: opt.TopologyOption = "paper:er8",
    strategies: opt.Strategies = list(COMPARED),
    seed: opt.Seed = 0,
    output: opt.FolderOrNone = None,
    as_json: opt.Json = False,
) -> None:
    """See what a communication budget buys: train digits for real on 8 processes, by each strategy.

    Beside the plans for a budget stand what people run (allreduce as in DDP, local SGD), and
    silence, which shows what doing nothing would score. One seed: a demonstration only.

    Takes about three minutes on two cores. Training, processes and messages are real; the speed of
    the links is emulated. Everything is written below runs/, with a report for a browser.
    """
    from matcha.report import compare, load_runs, write_report

    require("torch")  # which only the workers import
    names = tuple(opt.words(strategies))
    stem = datetime.now().strftime("demo-%Y%m%d-%H%M")
    directory = output or free_directory(Path("runs"), stem)
    if directory.is_dir() and any(directory.iterdir()):
        raise InputError(f"{str(directory)!r} is not empty: choose another --output.")
    demo = Demo(
        directory=directory,
        topology=topology,
        strategies=names,
        budget=budget,
        link_mbps=link_mbps,
        target_loss=target_loss,
        epochs=epochs,
        seed=seed,
    )
    with patient_progress("planning"):
        families.parse(topology)
        for name in names:
            strategy_named(name)
        check_budget(budget)
        make_folder(directory)  # only now: a demo that cannot start leaves none behind
        plans = make_plans(demo)
    num_workers = next(iter(plans.values())).num_workers
    _announce(demo, num_workers)
    with _Bars(demo) as bars:
        run_demo(demo, num_workers, bars.show)
    runs = load_runs([demo.run_directory(name) for name in names])
    comparison = compare(runs, target_loss)
    with keeping() as keep:
        with patient_progress("writing the report") as progress:
            page = keep(
                directory / "report.html",
                lambda path: write_report(
                    runs,
                    path,
                    title=f"Digits on {num_workers} workers over {link_mbps:g} Mbit/s links",
                    target_loss=target_loss,
                    progress=progress,
                ),
            )
        if as_json:
            print_json(comparison.to_json() | {"report": str(page)})
            return
        _print(demo, comparison)
        console.print(f"\nreport: [cyan]{page}[/]  (open it in a browser; it needs no network)")


def _announce(demo: Demo, num_workers: int) -> None:
    _narrator.print(
        f"Training digits on [bold]{num_workers} processes[/] ({demo.topology}); "
        f"links emulated at [bold]{demo.link_mbps:g} Mbit/s[/].\n"
        "vanilla talks over every link in every iteration, allreduce averages exactly; those with "
        f"a budget have [bold]{demo.budget:.0%}[/] of vanilla's time, silent has none.\n"
        f"Each trains until the average model's training loss holds {demo.target_loss:g}. "
        "Starting the processes takes a moment.",
        highlight=False,
    )


class _Bars:
    """A bar a strategy, which fills as the loss falls to the target."""

    def __init__(self, demo: Demo) -> None:
        self._demo = demo
        self._first: dict[str, float] = {}
        self._before: dict[str, float] = {}
        self._progress = Progress(
            TextColumn("{task.description:<9}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[words]}"),
            console=_narrator,
        )
        self._tasks = {
            name: self._progress.add_task(name, total=1.0, words="waiting")
            for name in demo.strategies
        }

    def show(self, strategy: str, record: Record) -> None:
        loss, target = record.train_loss, self._demo.target_loss
        if loss is None or has_diverged(loss):
            self._progress.update(self._tasks[strategy], words="diverged")
            return
        first = self._first.setdefault(strategy, max(loss, 2 * target))
        way = math.log(first / max(loss, target)) / math.log(first / target)
        words = f"epoch {record.epoch:.0f}  loss {loss:.3f}  {record.time:.1f} s"
        held = self._before.get(strategy, math.inf) <= target and loss <= target
        self._before[strategy] = loss
        if held:
            words += "  [green]reached[/]"
        elif record.epoch >= self._demo.epochs:
            words += "  [yellow]not reached[/]"
        self._progress.update(self._tasks[strategy], completed=way, words=words)

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def _print(demo: Demo, comparison: Comparison) -> None:
    from matcha.report.tables import cell, columns

    rows = [asdict(row) for row in comparison.rows]
    wanted = ("time_to_target", "speedup", "comm_seconds", "train_loss", "test_accuracy")
    shown = [c for c in columns(rows) if c.key in wanted]
    table = Table(
        title=f"to training loss {demo.target_loss:g}, links emulated at {demo.link_mbps:g} Mbit/s",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1),
    )
    cells = {c.heading: [cell(c, row) for row in rows] for c in shown}
    whole = sum(3 + max(map(len, [heading, *found])) for heading, found in cells.items())
    table.add_column("strategy")
    for heading, found in cells.items():
        # Left to itself, rich gives what it takes from one column to another, and cuts the last.
        narrow = max(map(len, [*heading.split(), *found]))
        width = narrow if whole + _NAMES > console.width else None
        table.add_column(heading, justify="right", width=width)
    for row, *found in zip(rows, *cells.values(), strict=True):
        table.add_row(row["label"], *found)
    console.print(table)
    console.print(f"\n{comparison.verdict.sentence}", highlight=False)
