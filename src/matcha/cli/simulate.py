"""`matcha simulate`: what plans do to training, all workers on one device."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from matcha.cli import app
from matcha.cli import options as opt
from matcha.cli.help import Command
from matcha.cli.output import (
    Results,
    check_writable,
    console,
    keeping,
    patient_progress,
    print_comparison,
    print_json,
    said_in_log,
    serving,
)
from matcha.errors import InputError, is_installed
from matcha.plans import Events, PlanLike, load_plan
from matcha.records import find_runs
from matcha.rounds import ONE_WAY
from matcha.strategies import comparable, strategy_with
from matcha.strategies import plan as make_plan
from matcha.topology import families
from matcha.wires import parse_wire

if TYPE_CHECKING:
    from matcha.records import Record, Run
    from matcha.training.jobs import Job


@app.command("simulate", cls=Command)
def simulate_command(
    context: typer.Context,
    topology: str = opt.topology("paper:er8"),
    task: str = typer.Option(
        "digits",
        help="What to train: digits, logistic, quadratic, cifar10, cifar100, ptb, or your own as "
        "MODULE:FUNCTION.",
    ),
    strategies: list[str] = opt.several(
        "strategy", "silent", "allreduce", "local", "vanilla", "matcha", "greedy"
    ),
    period: int | None = opt.PERIOD,
    switch: bool = opt.SWITCH,
    alpha: str = opt.ALPHA,
    budgets: list[str] = opt.several("budget", 0.5),
    wires: list[str] = opt.several("wire", "float32"),
    seeds: list[str] = opt.several("seed", "0"),
    plans: list[Path] = typer.Option([], "--plan", help="Saved plans instead of strategies."),
    epochs: int | None = opt.EPOCHS,
    batch_size: int | None = opt.BATCH_SIZE,
    learning_rate: float | None = opt.LEARNING_RATE,
    optimizer: str | None = typer.Option(
        None,
        help="Another optimizer than the task's own: sgd (without momentum), adam, adamw or muon "
        "(whose learning rate is 0.001 unless you give one).",
    ),
    momentum: str = opt.MOMENTUM,
    model: str | None = opt.MODEL,
    overlap: bool = typer.Option(
        False,
        "--overlap",
        help="Mix before the step (x ← Wx − ηu), so that the exchange overlaps the gradient.",
    ),
    partition: str = opt.PARTITION,
    concentration: float = typer.Option(
        0.5, help="With a Dirichlet partition: the smaller, the more workers' data differ."
    ),
    worker_weights: str | None = opt.WEIGHTS_OR_DATA,
    num_train: int | None = typer.Option(None, help="Use only this many training examples."),
    num_test: int | None = typer.Option(None, help="Use only this many test examples."),
    data: Path | None = opt.DATA,
    device: str = opt.DEVICE,
    precision: str = typer.Option(
        "auto", help="float32, float64 or bfloat16; auto: bfloat16 on CUDA."
    ),
    streams: int = typer.Option(8, help="CUDA: workers whose passes may overlap."),
    compile: bool = opt.COMPILE,
    clip: float | None = opt.CLIP,
    evaluate_every: int = typer.Option(1, help="Epochs between tests of the average model."),
    statistics: str = typer.Option(
        "recalibrated", help="Statistics of BatchNorm: recalibrated or averaged."
    ),
    compute_time: float | None = opt.COMPUTE_TIME_OR_MEASURED,
    link_time: float = opt.LINK_TIME,
    events: Path | None = typer.Option(
        None, help="A JSON file of events: workers lost and back, links cut or slower."
    ),
    speeds: str | None = typer.Option(
        None, help="Speed of each worker, with commas: in 1,1,1,0.25 the last is 4 times slower."
    ),
    asynchronous: bool = typer.Option(
        False,
        "--asynchronous",
        help="Run each plan of pairs once more with meetings whenever both have time.",
    ),
    output: Path = opt.folder("runs/simulate"),
    resume: bool = opt.RESUME,
    format: str = typer.Option(
        "auto", help="Figures as png, svg, pdf or none; auto: png if matplotlib is installed."
    ),
    serve: str | None = opt.SERVE,
    report: bool = opt.REPORT,
    as_json: bool = opt.JSON,
) -> None:
    """Train by one or several plans, all workers on one device, and compare.

    Shows loss and accuracy against epochs and against time, where time is computing plus what
    each round exchanges. Each run is a directory that `matcha report` reads. By default greedy is
    there twice: with whole messages, and with those that `matcha tune` would choose for its budget.

    [bold]Examples[/]

      matcha simulate paper:er8 -s vanilla,matcha,greedy -b 0.1

      matcha simulate ring:4 -s greedy --speeds 1,1,1,0.25 --asynchronous

      matcha simulate paper:er8 -s vanilla,greedy -b 0.02 --wire float32,modulo:3

      matcha simulate torus:4x4 --task cifar10 --data ~/data --model resnet20
    """
    from matcha.report.figures import check_format
    from matcha.simulation import Delays, Execution
    from matcha.training.jobs import make_jobs
    from matcha.zoo.recipes import Choices, recipe

    opt.check_alpha(alpha)
    if format == "auto":
        format = "png" if is_installed("matplotlib") else "none"
    if format != "none":
        check_format(Path(f"figure.{format}"))
    chosen = recipe(task)
    how = "epochs learning_rate optimizer clip momentum overlap evaluate_every statistics"
    pace = tuple(opt.numbers([speeds], "--speeds")) if speeds else ()
    settings = chosen.settings(
        **opt.taken(context, how),
        delays=Delays(compute_time=compute_time, link_time=link_time, speeds=pace),
        execution=Execution.auto(device, precision, streams=streams, compile=compile),
    )
    script = Events.read(events) if events is not None else None
    numbered = opt.numbers(seeds, "--seed", int)
    if not numbered or len(set(numbered)) < len(numbered):
        raise InputError(f"--seed is {','.join(seeds)!r}: name each choice once.")
    if resume and not find_runs(output):
        raise InputError(
            f"{str(output)!r} holds no run to go on with: leave --resume out to start one."
        )
    check_writable(output, output)
    messages = [parse_wire(wire).name for wire in opt.words(wires)] or ["float32"]
    saved: list[PlanLike] = [load_plan(file) for file in plans]
    if len({plan.num_workers for plan in saved}) > 1:
        raise InputError("the plans are for different numbers of workers")
    if saved:
        names = ("topology", "strategies", "budgets", "wires", "switch", "alpha", "worker_weights")
        opt.refuse(context, names, "for planning: a saved plan has its own; leave --plan out.")
    by_default = not opt.given(context, ["strategies", "wires"])
    known = opt.words(strategies), opt.numbers(budgets), messages
    jobs = []
    for seed in numbered:
        made = saved or _plans(
            topology, *known, by_default, alpha=alpha, switch=switch, period=period, seed=seed
        )
        what = "data model batch_size partition concentration num_train num_test"
        number = made[0].num_workers
        spec = chosen.spec(Choices(num_workers=number, seed=seed, **opt.taken(context, what)))
        made = [opt.weighted(plan, worker_weights, spec) for plan in made]
        jobs += make_jobs(spec, made, settings, output=output, events=script)
    with serving(output, serve):
        runs = _run(jobs, asynchronous, resume)
    with keeping() as results:
        if format != "none":
            _draw(runs, output, format, results)
        results.page(output / "report.html" if report else None, runs)
        if as_json:
            from matcha.report import compare

            files = [str(path) for path in results.written]
            print_json(compare(runs).to_json() | {"figures": files})
            return
        _show(runs, None if plans else alpha)
        results.say()


def _plans(
    topology: str,
    names: Sequence[str],
    budgets: Sequence[float],
    wires: Sequence[str],
    by_default: bool,
    *,
    alpha: str,
    switch: bool,
    period: int | None,
    seed: int,
) -> list[PlanLike]:
    """Every strategy, budget and wire; by default greedy over a small wire beside them."""
    from matcha.tuning import small_messages

    if not names or not budgets:
        raise InputError("simulating needs at least one strategy and one budget.")
    graph = families.parse(topology)
    own = opt.with_period(names, period)
    known = [strategy_with(name, switch=switch, **own) for name in names]
    if by_default and graph.directed:  # the others need links that carry both ways
        known = [strategy for strategy in known if set(strategy.mixings) & set(ONE_WAY)]
    wanted = [
        (comparable(strategy, alpha), budget, wire)  # type: ignore[arg-type]  # checked there
        for strategy in known
        for budget in strategy.budgets(budgets)
        for wire in strategy.wires(wires, graph)
    ]
    plans: list[PlanLike] = []
    with patient_progress("planning") as progress:
        for strategy, budget, wire in wanted:
            plans.append(make_plan(graph, budget, strategy, seed=seed, wire=wire))
            progress(len(plans), len(wanted), "plans")
    small = by_default and not graph.directed
    return plans + [small_messages(graph, budget, seed) for budget in budgets if small]


def _run(jobs: Sequence[Job], asynchronous: bool, resume: bool) -> list[Run]:
    """Run the jobs under live progress on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from matcha.report import words
    from matcha.simulation import run_jobs

    terminal = Console(stderr=True)
    bar = [BarColumn(bar_width=20)] if terminal.width >= 100 else []  # the numbers come first
    progress = Progress(
        TextColumn("{task.description}"),
        *bar,
        TextColumn("epoch {task.completed:g}/{task.total:g}"),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(),
        console=terminal,
        disable=not sys.stderr.isatty(),
    )

    def sentence() -> str:
        if not progress.tasks:
            return "matcha: still preparing the first run …"
        row = progress.tasks[-1]
        epoch = f"epoch {row.completed:g} of {row.total:g}"
        return ", ".join(filter(None, [f"matcha: {row.description}: {epoch}", row.fields["state"]]))

    def show(job: Job, record: Record | None) -> None:
        if record is None:
            progress.add_task(job.label, total=job.settings.epochs, state="")
            return
        apart = f", consensus {record.consensus_distance:.2g}" if bar else ""  # else no room
        state = f"{words.loss_in_words(record)}{apart}, {record.time:,.1f} s"
        progress.update(progress.tasks[-1].id, completed=record.epoch, state=state)

    try:
        with progress, said_in_log(sentence):
            runs = run_jobs(jobs, asynchronous=asynchronous, resume=resume, on_record=show)
            for row in progress.tasks:
                if not row.completed:
                    progress.update(row.id, completed=row.total, state="had ended before")
            return runs
    except KeyboardInterrupt:
        typer.echo("matcha: stopped; the same command with --resume goes on from there.", err=True)
        raise typer.Exit(130) from None


def _draw(runs: Sequence[Run], folder: Path, format: str, results: Results) -> None:
    from matcha.report.figures import draw_curves

    wanted = [("train_loss", "epoch"), ("train_loss", "time"), ("consensus_distance", "epoch")]
    if any(record.gradient_norm is not None for run in runs for record in run.records):
        wanted.append(("gradient_norm", "epoch"))
    for metric, axis in wanted:
        path = folder / f"{metric}-{axis}.{format}"
        results.plot(path, partial(draw_curves, runs, metric, axis))


def _show(runs: Sequence[Run], alpha: str | None) -> None:
    from matcha.report import compare
    from matcha.report.groups import clock_in_words

    comparison = compare(runs)
    title = f"{runs[0].header.task}, {runs[0].header.num_workers} workers, simulated clock"
    if runs[0].header.momentum not in (None, "local"):
        title += f", momentum {runs[0].header.momentum}"
    if comparison.target is not None:
        title += f"; target: training loss {comparison.target:.4g}"
    print_comparison(comparison, title)
    counted = clock_in_words(runs)
    if counted is not None:
        console.print(f"clock: {counted}", style="dim", highlight=False)
    if alpha is not None:
        console.print(f"mixing weights: each the best for {opt.BEST_FOR[alpha]}", style="dim")
    for row, group in zip(comparison.rows, comparison.groups, strict=True):
        for note in getattr(group[0].plan, "notes", ()):
            console.print(f"{row.label}: {note}", style="dim", highlight=False)
