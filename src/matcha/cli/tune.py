"""`matcha advise` and `matcha tune`: what to train with, before and after some of it was tried."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import typer

from matcha.cli import app
from matcha.cli import options as opt
from matcha.cli.help import Command
from matcha.cli.output import check_places, console, keeping, patient_progress, print_json
from matcha.errors import InputError
from matcha.plans import OuterStep
from matcha.strategies import strategy_with
from matcha.topology import families
from matcha.tuning import (
    DEFAULT_BUDGETS,
    DEFAULT_STRATEGIES,
    DEFAULT_WIRES,
    MAX_TRIALS,
    Problem,
    advise,
    tune,
)

_TRIAL_EPOCHS = 12
_TRIALS = ("epochs", "learning_rate", "batch_size", "model", "data", "target_loss")


@app.command("advise", cls=Command)
def advise_command(
    context: typer.Context,
    compute_time: float = opt.COMPUTE_TIME,
    topology: str | None = typer.Argument(
        None, help="The links: a file of [cyan]matcha probe[/], or a name like ring:8."
    ),
    workers: int | None = typer.Option(
        None,
        help="Instead of a topology: the number of workers behind one switch, where all reach all.",
    ),
    model_mb: float | None = typer.Option(None, help="Megabytes of the parameters as float32."),
    link_mbps: float | None = typer.Option(
        None, help="Mbit/s of a worker's link, each way; not needed with a file of probe."
    ),
    latency: float = typer.Option(0.0, help="Seconds that a message of any size takes."),
    alike: bool = typer.Option(
        False, "--alike", help="All workers draw from the same data; by default each has its own."
    ),
    plain_sgd: bool = typer.Option(
        False, "--plain-sgd", help="The optimizer has no momentum, as SGD without it."
    ),
    overlap: bool = opt.OVERLAP,
    seed: int = opt.SEED,
    output: Path | None = opt.PLAN_FILE,
    force: bool = opt.FORCE,
    as_json: bool = opt.JSON,
) -> None:
    """Say what to train with: DDP, local SGD or a plan, from speeds and sizes alone.

    One row for each, with seconds per iteration and the disagreement that it leaves; the last
    column weighs both. Once you have a task, [cyan]matcha tune[/] --task tries the best few.

    [bold]Examples[/]

      matcha advise --workers 8 --model-mb 100 --link-mbps 1000 --compute-time 0.1

      matcha advise network.json --compute-time 0.1 -o plan.json
    """
    check_places(force, output=output)
    if (topology is None) == (workers is None):
        raise InputError("give a topology or --workers, one of the two.")
    with patient_progress("planning"):
        found = advise(
            families.parse(topology) if topology is not None else workers or 0,
            momentum=not plain_sgd,
            **opt.taken(context, "compute_time model_mb link_mbps latency alike overlap seed"),
        )
    with keeping() as results:
        results.write(output, found.best.plan.save)
        if as_json:
            print_json(found.to_json())
            return
        console.print(found.table(), highlight=False)
        results.say()


@app.command("tune", cls=Command)
def tune_command(
    context: typer.Context,
    topology: str = opt.topology(),
    compute_time: float = opt.COMPUTE_TIME,
    link_time: float | None = opt.LINK_TIME_OR_NONE,
    latency: float = typer.Option(
        0.0, help="Seconds of --link-time that a message of any size takes; no wire saves them."
    ),
    budgets: list[str] = opt.several("budget", *DEFAULT_BUDGETS),
    strategies: list[str] = opt.several("strategy", *DEFAULT_STRATEGIES),
    wires: list[str] = opt.several("wire", *DEFAULT_WIRES),
    task: str | None = typer.Option(
        None,
        help="Train with the best few, all workers on this machine: digits, logistic, … as for "
        "[cyan]matcha simulate[/]. Without a task theory decides.",
    ),
    max_trials: int = typer.Option(MAX_TRIALS, help="Plans to try at most, with --task."),
    outer: list[str] = typer.Option(
        ["none"],
        help="With --task: steps to try after rounds, as RATE/MOMENTUM or none; "
        "[cyan]none,0.7/0.5[/] tries both.",
    ),
    rate_factors: list[str] = typer.Option(
        ["1"],
        "--rate-factor",
        help="With --task: multiples of the learning rate at which the best plan is tried too.",
    ),
    epochs: int | None = opt.EPOCHS,
    learning_rate: float | None = opt.LEARNING_RATE,
    batch_size: int | None = opt.BATCH_SIZE,
    model: str | None = opt.MODEL,
    partition: str = opt.PARTITION,
    data: Path | None = opt.DATA,
    target_loss: float | None = typer.Option(
        None,
        help="With --task: the average model's training loss to reach; by default what exact "
        "averaging holds after two thirds of the epochs.",
    ),
    target_gap: float = typer.Option(
        0.01, help="Without a task: the wanted excess loss of the average model."
    ),
    initial_gap: float = typer.Option(1.0, help="The excess loss at the start."),
    smoothness: float = typer.Option(1.0, help="L, the largest curvature of the loss."),
    strong_convexity: float | None = typer.Option(
        None, help="The smallest curvature, for strongly convex losses."
    ),
    gradient_variance: float = typer.Option(1.0, help="Variance of a worker's gradient."),
    dissimilarity: float = typer.Option(
        0.0, help="How far workers' expected gradients lie apart (heterogeneous data), squared."
    ),
    overlap: bool = opt.OVERLAP,
    seed: int = opt.SEED,
    effort: str = opt.EFFORT,
    output: Path | None = opt.PLAN_FILE,
    plot: Path | None = opt.PLOT,
    page: Path | None = typer.Option(None, help="Write a page (.html) that shows the plan."),
    force: bool = opt.FORCE,
    as_json: bool = opt.JSON,
) -> None:
    """Choose strategy, budget and wire: the plan whose average model reaches a target soonest.

    Theory predicts every combination; with a task the best few are trained, and what they needed
    decides. Smaller messages buy more rounds in the same time, as far as the links' latency allows.

    [bold]Examples[/]

      matcha tune paper:er16 --compute-time 0.1 --link-time 0.05 --plot tune.svg

      matcha tune network.json --compute-time 0.1 --task digits -o plan.json
    """
    from matcha.report import figures

    check_places(force, output=output, plot=plot, page=page)
    with patient_progress("reading the network"):
        graph = families.parse(topology)
    loss = "smoothness strong_convexity gradient_variance dissimilarity initial_gap target_gap"
    problem = Problem(**opt.taken(context, loss))
    outer_steps = [_outer_step(word) for word in opt.words(outer)]
    factors = opt.numbers(rate_factors, "--rate-factor")
    trials = None
    if task is None:
        opt.refuse(context, _TRIALS, "for trials: say what to train with --task.")
    else:
        from matcha.simulation import Constant, Settings, TaskTrials
        from matcha.zoo.recipes import Choices, recipe

        chosen = recipe(task)
        own = opt.taken(context, "data model batch_size partition")
        choices = Choices(num_workers=graph.num_workers, seed=seed, **own)
        # Decays of the learning rate come when trials have long ended.
        base = chosen.learning_rate if learning_rate is None else learning_rate
        settings = Settings(
            epochs=_TRIAL_EPOCHS if epochs is None else epochs,
            schedule=Constant(base=base),
            optimizer=chosen.optimizer,
        )
        with patient_progress("exact averaging, for comparison"):
            made = chosen.task(choices)
            trials = TaskTrials(made, graph, settings, target_loss=target_loss)
    with patient_progress("tuning") as progress:
        found = tune(
            graph,
            **opt.taken(context, "compute_time link_time latency overlap seed max_trials"),
            problem=problem,
            strategies=[strategy_with(name, effort=effort) for name in opt.words(strategies)],
            budgets=opt.numbers(budgets),
            wires=opt.words(wires),
            trials=trials,
            outer=outer_steps,
            rate_factors=factors,
            progress=progress,
        )
    with keeping() as results:
        results.write(output, found.plan.save)
        results.plot(plot, partial(figures.draw_tuning, found))
        results.page(page, [], plans=[found.plan])
        if as_json:
            print_json(found.to_json() | ({"target_loss": trials.target} if trials else {}))
            return
        if trials is not None:
            console.print(
                f"{task}: the target is a training loss of {trials.target:.4g}; exact averaging "
                f"holds it after {trials.exact_iterations:.0f} iterations",
                highlight=False,
            )
        console.print(found.table(), highlight=False)
        results.say()


def _outer_step(word: str) -> OuterStep | None:
    """An outer step as RATE/MOMENTUM; in the form that pairs and gossip have."""
    if word == "none":
        return None
    rate, _, momentum = word.partition("/")
    try:
        return OuterStep(rate=float(rate), momentum=float(momentum), nesterov=False)
    except ValueError:
        raise InputError(
            f"--outer {word!r} is not RATE/MOMENTUM, such as 0.7/0.5, or none."
        ) from None
