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
from matcha.records import Record, Run, find_runs, has_diverged, read_run
from matcha.report import words
from matcha.report.summary import find_moment

_BLOCKS = "▁▂▃▄▅▆▇█"
_METRICS = (
    ("train_loss", "training loss", True),
    ("worker_loss", "workers' own loss", True),
    ("test_loss", "test loss", True),
    ("test_accuracy", "test accuracy", False),
    ("consensus_distance", "consensus distance", True),
)
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
    last: Run | None = None
    with Live(console=console, auto_refresh=False) as live:
        while True:
            over = until() if until is not None else False
            try:
                last = latest(directory)
            except InputError:
                # Before the first record a run has no readable directory.
                if until is None:
                    raise
            if last is not None:
                live.update(frame(last), refresh=True)
            if over or (until is None and last is not None and is_finished(last)):
                return
            time.sleep(refresh)


def latest(directory: str | Path) -> Run:
    """The run in a directory, or the one below it that was written to last."""
    below = find_runs(directory)
    if not below:
        raise InputError(f"{str(directory)!r} holds no run (no run.json there or below).")
    return read_run(max(below, key=_last_written))


def frame(run: Run) -> RenderableType:
    """One picture of a run."""
    parts: list[RenderableType] = [_title(run)]
    if not run.records:
        return Group(*parts, Text("waiting for the first record …", style="dim"))
    parts += [_progress(run), _metrics(run.records)]
    if run.worker_records:
        parts.append(_workers(run))
    return Group(*parts)


def is_finished(run: Run) -> bool:
    """Whether the run has come to the end that its configuration names."""
    if not run.records:
        return False
    last = run.records[-1]
    losses = (last.train_loss, last.worker_loss)
    if any(loss is not None and has_diverged(loss) for loss in losses):
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


def _title(run: Run) -> Text:
    header = run.header
    place = "" if run.plan is None else f" on {run.plan.topology.name}"
    title = Text.assemble(
        (f"{header.task}{place}", "bold"),
        f"  {header.strategy}, budget {header.budget:g}, {header.num_workers} workers, ",
        f"{header.clock} clock",
    )
    mbps = header.setting("link_mbps")
    if mbps is not None:
        title.append(f", links emulated at {str(mbps).removesuffix(' (emulated)')} Mbit/s")
    return title


def _progress(run: Run) -> Table:
    last = run.records[-1]
    grid = Table.grid(padding=(0, 2))
    epochs = _epochs(run)
    rate = last.iteration / last.time if last.time else 0.0
    words_ = f"epoch {last.epoch:g}" + (f" of {epochs:g}" if epochs else "")
    cells: list[RenderableType] = [
        words_,
        f"iteration {last.iteration}",
        f"{rate:.3g} iterations/s",
    ]
    cells.append(words.seconds(last.time))
    if epochs is not None:
        cells.append(ProgressBar(total=epochs, completed=last.epoch, width=24))
    grid.add_row(*cells)
    return grid


def _metrics(records: Sequence[Record]) -> Table:
    table = Table.grid(padding=(0, 2))
    for key, name, logarithmic in _METRICS:
        values = [v for r in records if (v := getattr(r, key)) is not None]
        if values:
            curve = sparkline(values, logarithmic=logarithmic)
            latest_ = words.percent(values[-1]) if key == "test_accuracy" else f"{values[-1]:.4g}"
            table.add_row(name, Text(latest_, style="bold"), Text(curve, style="green"))
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
        name = str(worker) if run.plan is None else str(run.plan.topology.labels[worker])
        links = "" if run.plan is None else str(run.plan.topology.degrees[worker])
        table.add_row(
            name,
            links,
            str(records[-1].iteration),
            "" if loss is None else f"{loss:.4g}",
            words.seconds(busy),
            words.seconds(talk),
            Text.assemble(("━" * round(12 * share), "blue"), f" {share:.0%}"),
        )
    if len(run.worker_records) > len(shown):
        table.add_row(f"and {len(run.worker_records) - len(shown)} more", *[""] * 6)
    return table


def _last_written(directory: Path) -> float:
    return max(file.stat().st_mtime for file in directory.glob("*.json*"))
