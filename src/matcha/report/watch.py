"""The live view: a run's directory as a dashboard in the terminal, while it grows or afterwards."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from matcha.errors import InputError
from matcha.records import Record, Run, find_runs, has_diverged, last_written, read_run
from matcha.report import words
from matcha.report.summary import find_moment

_BLOCKS = "▁▂▃▄▅▆▇█"
_METRICS = ("train_loss", "worker_loss", "test_loss", "test_accuracy", "consensus_distance")
_MAX_WORKERS = 16


def watch(
    directory: str | Path,
    *,
    until: Callable[[], bool] | None = None,
    refresh: float = 0.5,
    console: Console | None = None,
) -> None:
    """Show a run as it grows: loss, consensus, throughput, and how busy each worker's links are.

    Args:
        directory: The run's directory; it need not hold anything yet when `until` is given.
        until: Asked before every frame; True ends the view (say, once the workers have ended).
            By default the view ends when the run is finished.
        refresh: Seconds between frames.
        console: Where to draw.
    """
    with Live(console=console, auto_refresh=False) as live:
        while True:
            is_over = until is not None and until()
            try:
                run = latest(directory)
                live.update(frame(run), refresh=True)
                is_over = is_over or (until is None and is_finished(run))
            except InputError:
                # Before the first record a run has no readable directory.
                if until is None:
                    raise
            if is_over:
                return
            time.sleep(refresh)


def latest(directory: str | Path) -> Run:
    """The run in a directory, or the one below it that was written to last."""
    below = find_runs(directory)
    if not below:
        raise InputError(f"{str(directory)!r} holds no run (no run.json there or below).")
    return read_run(max(below, key=last_written))


def is_finished(run: Run) -> bool:
    """Whether the run has come to the end that its configuration names."""
    if not run.records:
        return False
    last = run.records[-1]
    if any(x is not None and has_diverged(x) for x in (last.train_loss, last.worker_loss)):
        return True
    target = run.header.setting("target_loss")
    if isinstance(target, (int, float)) and find_moment(run, "train_loss", target) is not None:
        return True
    epochs = _epochs(run)
    return epochs is not None and last.epoch >= epochs


def _epochs(run: Run) -> float | None:
    """How many epochs were asked for."""
    epochs = run.header.setting("epochs")
    return float(epochs) if isinstance(epochs, (int, float)) else None


def frame(run: Run) -> RenderableType:
    """One picture of a run."""
    header = run.header
    place = "" if run.plan is None else f" on {run.plan.topology.name}"
    title = Text.assemble(
        (f"{header.task}{place}", "bold"),
        f"  {header.strategy}, budget {header.budget:g}, {header.num_workers} workers, ",
        f"{header.clock} clock",
    )
    if (speed := words.link_speed(header)) is not None:
        title.append(f", links emulated at {speed}")
    if not run.records:
        return Group(title, Text("waiting for the first record …", style="dim"))
    parts = [_progress(run), _metrics(run.records)]
    return Group(title, *parts, *([_workers(run)] if run.worker_records else []))


def _progress(run: Run) -> Table:
    last, epochs = run.records[-1], _epochs(run)
    rate = last.iteration / last.time if last.time else 0.0
    cells: list[RenderableType] = [
        f"epoch {last.epoch:g}" + (f" of {epochs:g}" if epochs else ""),
        f"iteration {last.iteration}",
        f"{rate:.3g} iterations/s",
        words.seconds(last.time),
    ]
    if epochs is not None:
        cells.append(ProgressBar(total=epochs, completed=last.epoch, width=24))
    grid = Table.grid(padding=(0, 2))
    grid.add_row(*cells)
    return grid


def _metrics(records: Sequence[Record]) -> Table:
    table = Table.grid(padding=(0, 2))
    for key in _METRICS:
        values = [v for r in records if (v := getattr(r, key)) is not None]
        if values:
            is_share = key == "test_accuracy"
            last = words.percent(values[-1]) if is_share else f"{values[-1]:.4g}"
            curve = sparkline(values, logarithmic=not is_share)
            table.add_row(words.NAMES[key], Text(last, style="bold"), Text(curve, style="green"))
    return table


def _workers(run: Run) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("worker", "links", "iteration", "own loss", "computing", "talking", "share"):
        table.add_column(heading, justify="right" if heading not in ("share", "worker") else "left")
    shown = sorted(run.worker_records)[:_MAX_WORKERS]
    for worker in shown:
        records = run.worker_records[worker]
        if not records:
            continue
        talk = sum(r.comm_seconds or 0.0 for r in records)
        busy = sum(r.compute_seconds or 0.0 for r in records)
        share = talk / (talk + busy) if talk + busy else 0.0
        loss = records[-1].worker_loss
        topology = None if run.plan is None else run.plan.topology
        table.add_row(
            str(topology.labels[worker] if topology else worker),
            str(topology.degrees[worker]) if topology else "",
            str(records[-1].iteration),
            "" if loss is None else f"{loss:.4g}",
            words.seconds(busy),
            words.seconds(talk),
            Text.assemble(("━" * round(12 * share), "blue"), f" {share:.0%}"),
        )
    if len(run.worker_records) > len(shown):
        table.add_row(f"and {len(run.worker_records) - len(shown)} more", *[""] * 6)
    return table


def sparkline(values: Sequence[float], width: int = 32, *, logarithmic: bool = False) -> str:
    """A curve in one line of text.

    >>> sparkline([1, 2, 3, 4], width=4)
    '▁▃▆█'
    """
    known = [v for v in values if math.isfinite(v) and (v > 0 or not logarithmic)]
    if not known:
        return ""
    step = max(1, math.ceil(len(known) / width))
    shown = [math.log(v) if logarithmic else v for v in known[::step]]
    low, size = min(shown), max(shown) - min(shown) or 1.0
    return "".join(_BLOCKS[round((v - low) / size * (len(_BLOCKS) - 1))] for v in shown)
