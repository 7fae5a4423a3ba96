"""`matcha plan` and `matcha sweep`: certified plans of a topology, at one budget or at many."""

from __future__ import annotations

import json
from collections import defaultdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer
from rich.table import Table as RichTable

from matcha._io.tables import Table, amount, count_noun
from matcha.cli import app
from matcha.cli import options as opt
from matcha.cli.help import Command
from matcha.cli.output import (
    check_places,
    console,
    keeping,
    patient_progress,
    print_json,
    print_notes,
    print_table,
)
from matcha.errors import InputError, PlanError
from matcha.plans import Plan, PlanLike, StagedPlan, load_plan
from matcha.plans.plan import error_in_words
from matcha.strategies import COMPARED, make_strategy, staged_plan, strategy_with
from matcha.strategies import plan as make_plan
from matcha.sweeps import DEFAULT_BUDGETS, Sweep, SweepPoint, cycle_note, sweep
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
    topology: str = opt.topology(),
    budget: float = opt.budget(0.5),
    stage: list[str] = typer.Option(
        [],
        metavar="ITERATION:BUDGET",
        help="Another budget from this iteration on, such as [cyan]1000:0.1[/]; may be repeated.",
    ),
    strategy: str | None = opt.STRATEGY_OR_NONE,
    period: int | None = opt.PERIOD,
    seed: int = opt.SEED,
    mixing: str | None = opt.MIXING,
    matchings: str | None = typer.Option(
        None,
        help="Your own decomposition: a JSON file [[\\[i, j], …], …], or [cyan]authors[/] for the "
        "paper's graphs.",
    ),
    decomposition: str | None = typer.Option(
        None, help="What matcha splits the links into: matchings (the default), links or cliques."
    ),
    effort: str | None = opt.EFFORT_OR_NONE,
    wire: str = opt.WIRE,
    delay_exponent: float | None = typer.Option(
        None, help="A round of n matchings costs n^G instead of n (the paper's t(·))."
    ),
    worker_weights: str | None = opt.WEIGHTS,
    output: Path | None = opt.PLAN_FILE,
    plot: Path | None = opt.PLOT,
    force: bool = opt.FORCE,
    as_json: bool = opt.JSON,
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

    check_places(force, output=output, plot=plot)
    made: PlanLike
    if _is_saved_plan(topology):
        why = "for planning: a saved plan has its own; give a topology to plan again."
        opt.refuse(context, _PLANNING, why)
        made = load_plan(topology)
        if plot is not None and isinstance(made, StagedPlan):
            raise InputError("--plot draws one plan, and this one has several in stages.")
    else:
        with patient_progress("reading the network"):
            graph = families.parse(topology)
        default = "greedy" if matchings is None else "matcha"
        name = default if strategy is None else strategy
        own = opt.taken(context, "mixing decomposition effort") | opt.with_period([name], period)
        how = make_strategy(name, **{key: v for key, v in own.items() if v is not None})
        options: dict[str, Any] = {
            "matchings": _matchings(matchings, topology),
            "timing": _timing(delay_exponent, graph),
            "wire": wire,
        }
        if worker_weights is not None:
            options["worker_weights"] = opt.numbers([worker_weights], "--worker-weights")
        budgets = {0: budget} | _stages(stage)
        if plot is not None and stage:
            raise InputError("--plot draws one plan, and --stage makes several.")
        with patient_progress("planning") as options["progress"]:
            if stage:
                made = staged_plan(graph, budgets, how, seed, **options)
            else:
                made = make_plan(graph, budget, how, seed, **options)
    with keeping() as results:
        results.write(output, made.save)
        if isinstance(made, Plan):
            results.plot(plot, partial(figures.draw_plan, made))
        if as_json:
            print_json(made.to_json())
            return
        if isinstance(made, StagedPlan):
            _print_stages(made)
        else:
            _print_plan(made)
        print_notes(made.notes)
        results.say()


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


def _print_plan(plan: Plan) -> None:
    """The plan as a table: a row per matching, then what it promises."""
    title = f"{plan.strategy} plan for {plan.topology}"
    if any(plan.link_activity.values()):
        console.print(_matchings_table(plan, title))
    else:  # silence, or an average over all, which goes over no link of the plan's own
        console.print(title, style="italic", highlight=False)
    for name, value in _promises(plan).items():
        console.print(f"  [bold]{name:<28}[/] {value}")


def _matchings_table(plan: Plan, title: str) -> RichTable:
    table = RichTable(title=title, title_justify="left")
    rows = _distinct(plan)
    most = max(1.0, *(p for _, p in rows))
    # A round of more than one matching's time may use a matching more than once.
    used = "activation" if most == 1 else "times per\niteration"
    for heading in ("matching", used, "", f"time ({plan.timing.unit})", "links"):
        table.add_column(heading, justify="left" if heading in ("", "links") else "right")
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
    found: dict[Matching, float] = defaultdict(float)
    for matching, p in zip(plan.matchings, plan.schedule.uses, strict=True):
        found[tuple(sorted(matching))] += p
    return list(found.items())


def _print_stages(plan: StagedPlan) -> None:
    """A staged plan as a table: a row per stage, and what its level promises."""
    unit = f"{plan.timing.unit} per iteration"
    headings = ("from iteration", "strategy", "budget", unit, "consensus error", "rho")
    points = [SweepPoint.of(plan.levels[stage.level]) for stage in plan.stages]
    rows = [
        (
            f"{stage.start:,}",
            point.strategy,
            f"{point.budget:g}",
            f"{point.expected_comm_time:.4g}",
            point.error_in_words,
            point.rho_in_words,
        )
        for stage, point in zip(plan.stages, points, strict=True)
    ]
    print_table(Table(headings, rows), f"staged {plan.strategy} plan for {plan.topology}")
    for note in cycle_note(points):
        console.print(note)


def _links(plan: Plan, matching: Any) -> str:
    labels = plan.topology.labels
    names = [f"{labels[i]}–{labels[j]}" for i, j in matching]
    return "  ".join(names if len(names) <= 8 else [*names[:3], f"… {len(names) - 3} more"])


def _promises(plan: Plan) -> dict[str, str]:
    error, bound, certificate = plan.consensus_error, error_bound(plan.process), plan.certificate
    words = "not worked out" if error is None else error_in_words(error)
    lines = {"steady-state consensus error": words}
    if bound and error is not None:
        lines["no schedule goes below"] = f"{bound:.4g} ({error / bound:.2f} times)"
    kind = "of one step" if plan.rho_kind == "step" else "mean over a cycle"
    lines[f"rho ({kind})"] = f"{plan.rho:.4f}"
    lines["algebraic connectivity"] = f"{plan.algebraic_connectivity:.4g}"
    lines["mixing"] = f"{plan.mixing}, weight {plan.alpha:.4f}"
    time = amount(plan.expected_comm_time, plan.timing.unit)
    lines["communication"] = f"{time} per iteration"
    if certificate is not None:
        how = f"{count_noun(certificate.iterations, 'iteration')}, {certificate.seconds:.2f} s"
        lines["certified gap"] = f"{max(certificate.gap, 0.0):.2g} ({how})"
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


@app.command("sweep", cls=Command)
def sweep_command(
    topology: str = opt.topology(),
    budgets: list[str] = opt.several("budget", *DEFAULT_BUDGETS),
    strategies: list[str] = opt.several("strategy", *COMPARED),
    wires: list[str] = opt.several("wire", "float32"),
    alpha: str = opt.ALPHA,
    switch: bool = opt.SWITCH,
    seed: int = opt.SEED,
    effort: str = opt.EFFORT,
    plot: Path | None = opt.PLOT,
    force: bool = opt.FORCE,
    as_json: bool = opt.JSON,
) -> None:
    """Compare strategies over communication budgets: the paper's Figures 1c and 3.

    The consensus error is what disagreement remains in the long run under unit gradient noise:
    compare strategies by it (lower is better). Every strategy has the mixing weight that is best
    for it, or with --alpha rho for ρ, as in the paper. ρ is the contraction of disagreement per
    iteration, below 1 means consensus; of rounds that repeat in a cycle it is a mean over the
    cycle, which does not compare with the others and is marked so. Over a smaller wire the same
    budget, which is time, buys more rounds; the consensus error includes what the wire leaves of a
    difference.

    [bold]Example[/]

      matcha sweep paper:geometric16-d10 --budget 0.1,0.3,0.5 --plot sweep.svg

      matcha sweep paper:er8 -s greedy -b 0.02,0.1 --wire float32,modulo:3
    """
    from matcha.report import figures

    check_places(force, plot=plot)
    opt.check_alpha(alpha)
    with patient_progress("reading the network"):
        graph = families.parse(topology)
    with patient_progress("sweeping") as progress:
        points = sweep(
            graph,
            opt.numbers(budgets),
            [strategy_with(n, effort=effort, switch=switch) for n in opt.words(strategies)],
            wires=opt.words(wires),
            alpha=alpha,  # type: ignore[arg-type]  # checked by strategies
            seed=seed,
            progress=progress,
        )
    with keeping() as results:
        results.plot(plot, partial(figures.draw_sweep, points))
        if as_json:
            print_json(points.to_json())
            return
        _print_sweep(points, alpha)
        results.say()


def _print_sweep(points: Sweep, alpha: str) -> None:
    choices = [(point.strategy, point.wire) for point in points]
    changes = [n for n, pair in enumerate(pairwise(choices), start=1) if pair[0] != pair[1]]
    print_table(points.table(), str(points.topology), changes)
    averaging = [plan for plan in points.plans if plan.process.is_all_reduce]
    if averaging:
        names = " and ".join(dict.fromkeys(plan.strategy for plan in averaging))
        verb = "are" if " and " in names else "is"
        where = averaging[0].topology.name or "these links"
        console.print(f"{names} {verb} charged for a ring all-reduce on {where}.")
    console.print(f"Every strategy has the mixing weight that is best for {opt.BEST_FOR[alpha]}.")
    for note in points.notes:
        console.print(note)
