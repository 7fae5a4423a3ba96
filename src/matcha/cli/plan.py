"""`matcha plan`: a topology and a budget in, a certified plan out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from matcha._io.tables import amount, count_noun
from matcha.cli import app
from matcha.cli import options as opt
from matcha.cli.help import Command
from matcha.cli.output import (
    check_free,
    console,
    explain_marks,
    keeping,
    patient_progress,
    print_json,
    print_notes,
    rho_in_words,
)
from matcha.errors import InputError, PlanError
from matcha.plans import Plan, PlanLike, StagedPlan, load_plan
from matcha.plans.plan import error_in_words
from matcha.strategies import make_strategy, staged_plan
from matcha.strategies import plan as make_plan
from matcha.theory import error_bound
from matcha.timing import Scaled, Timing
from matcha.topology import Matching, Topology, families

_PLANNING = (
    "budget", "stage", "strategy", "period", "seed", "mixing", "matchings", "decomposition",
    "effort", "wire", "delay_exponent", "worker_weights",
)  # fmt: skip


@app.command("plan", cls=Command)
def plan_command(
    context: typer.Context,
    topology: opt.TopologyArgument,
    budget: opt.Budget = 0.5,
    stage: list[str] = typer.Option(
        [],
        metavar="ITERATION:BUDGET",
        help="Another budget from this iteration on, such as [cyan]1000:0.1[/]; may be repeated.",
    ),
    strategy: opt.StrategyOrNone = None,
    period: opt.Period = None,
    seed: opt.Seed = 0,
    mixing: str | None = typer.Option(
        None, help=f"{opt.MIXING_WORDS}; by default the strategy's own."
    ),
    matchings: str | None = typer.Option(
        None,
        help="Your own decomposition: a JSON file [[\\[i, j], …], …], or [cyan]authors[/] for the "
        "paper's graphs.",
    ),
    decomposition: str | None = typer.Option(
        None, help="What matcha splits the links into: matchings (the default), links or cliques."
    ),
    effort: opt.EffortOrNone = None,
    wire: opt.Wire = "float32",
    delay_exponent: float | None = typer.Option(
        None, help="A round of n matchings costs n^G instead of n (the paper's t(·))."
    ),
    worker_weights: opt.WorkerWeights = None,
    output: opt.PlanFile = None,
    plot: opt.Plot = None,
    force: opt.Force = False,
    as_json: opt.Json = False,
) -> None:
    """Plan the communication of a network of workers within a budget.

    Splits the links into matchings (links that can talk at the same time), chooses how often to
    use each one so that the network stays as well connected as the budget allows, and optimises
    the averaging weight. The answer comes with a certificate: how far from optimal it can be.

    [bold]Examples[/]

      matcha plan paper:er8 --budget 0.5

      matcha plan geometric:64:0.25:1 -b 0.1 -o plan.json --plot plan.svg

      matcha plan my-network.graphml --json

      matcha plan paper:er8 -b 0.5 --stage 1000:0.1 -o staged.json

    A saved plan instead of a topology is checked and shown:

      matcha plan plan.json --plot plan.svg
    """
    from matcha.report import figures

    check_free(output, force)
    check_free(plot, force)
    if plot is not None:
        figures.check_format(plot)
    made: PlanLike
    if _is_saved_plan(topology):
        opt.refuse(
            opt.given(context, _PLANNING),
            "for planning: a saved plan has its own; give a topology to plan again.",
        )
        made = load_plan(topology)
        if plot is not None and isinstance(made, StagedPlan):
            raise InputError("--plot draws one plan, and this one has several in stages.")
    else:
        with patient_progress("reading the network"):
            graph = families.parse(topology)
        own: dict[str, Any] = {"mixing": mixing, "decomposition": decomposition, "effort": effort}
        default = "greedy" if matchings is None else "matcha"
        name = default if strategy is None else strategy
        own |= opt.with_period([name], period)
        how = make_strategy(name, **{k: value for k, value in own.items() if value is not None})
        options: dict[str, Any] = {
            "matchings": _matchings(matchings, topology),
            "timing": _timing(delay_exponent, graph),
            "wire": wire,
        }
        if worker_weights is not None:
            options["worker_weights"] = opt.numbers([worker_weights], "--worker-weights")
        budgets = {0: budget} | _stages(stage)
        if plot is not None and len(budgets) > 1:
            raise InputError("--plot draws one plan, and --stage makes several.")
        with patient_progress("planning") as options["progress"]:
            made = (
                staged_plan(graph, budgets, how, seed, **options)
                if len(budgets) > 1
                else make_plan(graph, budget, how, seed, **options)
            )
    with keeping() as keep:
        if output is not None:
            output = keep(output, made.save)
        if plot is not None:
            assert isinstance(made, Plan)
            drawn = figures.draw_plan(made)
            plot = keep(plot, lambda path: figures.save_figure(drawn, path))
        if as_json:
            print_json(made.to_json())
            return
        if isinstance(made, StagedPlan):
            print_stages(made)
        else:
            print_plan(made)
        for path in (output, plot):
            if path is not None:
                console.print(f"wrote [cyan]{path}[/]")


def _stages(texts: list[str]) -> dict[int, float]:
    """The budget from each iteration on."""
    stages: dict[int, float] = {}
    for text in texts:
        start, _, budget = text.partition(":")
        try:
            iteration, value = int(start), float(budget)
        except ValueError:
            raise InputError(
                f"--stage is {text!r}, but it is ITERATION:BUDGET, such as 1000:0.1."
            ) from None
        if iteration < 1:
            raise InputError("a --stage starts at iteration 1 or later; --budget is what it ends.")
        if iteration in stages:
            raise InputError(f"two stages start at iteration {iteration}.")
        stages[iteration] = value
    return stages


def print_plan(plan: Plan) -> None:
    """The plan as a table: a row per matching, then what it promises."""
    title = f"{plan.strategy} plan for {plan.topology}"
    if any(plan.link_activity.values()):
        console.print(_matchings_table(plan, title))
    else:  # silence, or an average over all, which goes over no link of the plan's own
        console.print(title, style="italic", highlight=False)
    for name, value in _promises(plan):
        console.print(f"  [bold]{name:<28}[/] {value}")
    print_notes(plan.notes)


def _matchings_table(plan: Plan, title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("matching", justify="right")
    rows = _distinct(plan)
    most = max(1.0, *(p for _, p in rows))
    # A round of more than one matching's time may use a matching more than once.
    table.add_column("activation" if most == 1 else "times per iteration", justify="right")
    table.add_column("")
    table.add_column(f"time ({plan.timing.unit})", justify="right")
    table.add_column("links")
    shown = 12
    for number, (matching, p) in enumerate(rows[:shown], start=1):
        bar = "█" * round(12 * p / most) or "·"
        time = f"{plan.timing.matching_time(matching):.3g}"
        table.add_row(str(number), f"{p:.4f}", bar, time, _links(plan, matching))
    if len(rows) > shown:
        table.add_row("…", "", "", "", f"{len(rows) - shown} more")
    return table


def _distinct(plan: Plan) -> list[tuple[Matching, float]]:
    """Each matching once, with how often it is active: a cycle may hold it with several weights."""
    found: dict[Matching, float] = {}
    for matching, p in zip(plan.matchings, plan.schedule.uses, strict=True):
        key = tuple(sorted(matching))
        found[key] = found.get(key, 0.0) + p
    return list(found.items())


def print_stages(plan: StagedPlan) -> None:
    """A staged plan as a table: a row per stage, and what its level promises."""
    table = Table(title=f"staged {plan.strategy} plan for {plan.topology}", title_justify="left")
    unit = f"{plan.timing.unit} per iteration"
    for heading in ("from iteration", "strategy", "budget", unit, "consensus error", "rho"):
        table.add_column(heading, justify="right")
    for stage in plan.stages:
        level = plan.levels[stage.level]
        error = "–" if level.consensus_error is None else error_in_words(level.consensus_error)
        table.add_row(
            f"{stage.start:,}",
            level.strategy,
            f"{level.budget:g}",
            f"{level.expected_comm_time:.4g}",
            error,
            rho_in_words(level),
        )
    console.print(table)
    explain_marks(plan.levels)
    print_notes(plan.notes)


def _links(plan: Plan, matching: Any) -> str:
    labels = plan.topology.labels
    names = [f"{labels[i]}–{labels[j]}" for i, j in matching]
    return "  ".join(names if len(names) <= 8 else [*names[:3], f"… {len(names) - 3} more"])


def _promises(plan: Plan) -> list[tuple[str, str]]:
    error = plan.consensus_error
    lines = [
        (
            "steady-state consensus error",
            "not worked out" if error is None else error_in_words(error),
        ),
        (
            f"rho (of one {plan.rho_kind})"
            if plan.rho_kind == "step"
            else "rho (mean over a cycle)",
            f"{plan.rho:.4f}",
        ),
        ("algebraic connectivity", f"{plan.algebraic_connectivity:.4g}"),
        ("mixing", f"{plan.mixing}, weight {plan.alpha:.4f}"),
        ("communication", f"{amount(plan.expected_comm_time, plan.timing.unit)} per iteration"),
    ]
    bound = error_bound(plan.process)
    if bound and error is not None:
        lines.insert(1, ("no schedule goes below", f"{bound:.4g} ({error / bound:.2f} times)"))
    if plan.certificate is not None:
        c = plan.certificate
        how = f"{count_noun(c.iterations, 'iteration')}, {c.seconds:.2f} s"
        lines.append(("certified gap", f"{max(c.gap, 0.0):.2g} ({how})"))
    return lines


def _is_saved_plan(text: str) -> bool:
    """Whether the argument is a plan file rather than a topology."""
    path = Path(text)
    if path.suffix != ".json" or not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.read(200)
    return b'"matcha.plan/' in start or b'"matcha.staged-plan/' in start


def _matchings(given: str | None, topology: str) -> Any:
    if given is None:
        return None
    if given == "authors":
        family, _, name = topology.partition(":")
        if family != "paper":
            raise InputError("--matchings authors goes with a graph of the paper, as paper:er8.")
        return families.paper_matchings(name)
    try:
        return json.loads(Path(given).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise PlanError(f"{given!r} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise PlanError(f"{given!r} is not JSON: matchings are [[[i, j], …], …].") from None


def _timing(exponent: float | None, topology: Topology) -> Timing | None:
    if exponent is None:
        return None
    if not exponent > 0:
        raise InputError(f"--delay-exponent is {exponent!r}, but t(n) = n^G must increase: G > 0.")
    try:
        return Scaled(lambda n: float(n**exponent), topology.max_degree + 1)
    except OverflowError:
        raise InputError(f"--delay-exponent is {exponent!r}: n^G is beyond all numbers.") from None
