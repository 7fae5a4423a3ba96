"""Options that several commands share: each is spelled, and means, the same everywhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer
from typer import Option

from matcha.errors import InputError, unknown_name
from matcha.plans import Plan, PlanLike
from matcha.rounds import Mixing
from matcha.strategies import EFFORTS, OFFERED, STRATEGIES
from matcha.wires import WIRES

if TYPE_CHECKING:
    from matcha.training.task import TaskSpec


def _mixing_words() -> str:
    """The mixings that can be asked for, each with the strategies that take it."""
    found: dict[Mixing, list[str]] = {}
    for name in OFFERED:
        strategy = STRATEGIES[name]
        for mixing in strategy.mixings if "mixing" in strategy.options() else ():
            found.setdefault(mixing, []).append(name)
    return "; ".join(f"{mixing} ({', '.join(names)})" for mixing, names in found.items())


# -- the network and what may be spent on it -------------------------------------------------------

_TOPOLOGY = (
    "Which workers can talk to which: [cyan]ring:8[/], [cyan]path:8[/], [cyan]torus:4x4[/], "
    "[cyan]hypercube:4[/], [cyan]star:8[/], [cyan]complete:8[/], [cyan]barbell:8[/], "
    "[cyan]erdos-renyi:16:0.3:SEED[/], [cyan]geometric:16:0.4:SEED[/], a graph of the paper "
    "([cyan]paper:er8[/], [cyan]paper:geometric16-d5|d10|d13[/], [cyan]paper:er16[/]), or a file "
    "(CSV, JSON, GraphML, edge list, or adjacency matrix as .npy)."
)
_BUDGET = "Communication as a fraction of vanilla's, C_b in (0, 1]"
_STRATEGY = f"How the plan is made: {', '.join(OFFERED)}, or your own as MODULE:FUNCTION"
_WEIGHTS = "How much each worker counts, with SGD: a number for each, with commas"
_EFFORT = f"How long matcha and greedy search: {', '.join(EFFORTS[:-1])} or {EFFORTS[-1]}."
_WIRE = (
    f"What messages hold: {', '.join(WIRES[:-1])} or lowrank:R; smaller messages buy more rounds"
)


def topology(default: Any = ...) -> Any:
    """The network, as an argument."""
    return typer.Argument(default, metavar="TOPOLOGY", help=_TOPOLOGY)


def budget(default: float) -> Any:
    """The one budget."""
    return Option(default, "--budget", "-b", help=f"{_BUDGET}.")


_SEVERAL: dict[str, tuple[tuple[str, ...], str, str]] = {
    "budget": (("--budget", "-b"), "NUMBER,…", _BUDGET),
    "strategy": (("--strategy", "-s"), "TEXT,…", _STRATEGY),
    "wire": (("--wire",), "TEXT,…", _WIRE),
    "seed": (("--seed",), "INTEGER,…", "Seeds of rounds, weights and data"),
}


def several(kind: str, *default: str | float) -> Any:
    """Several budgets, strategies, wires or seeds."""
    names, metavar, about = _SEVERAL[kind]
    text = f"{about}; several with commas, or the option again."
    shown = [each if isinstance(each, str) else f"{each:g}" for each in default]
    return Option(shown, *names, metavar=metavar, help=text)


TOPOLOGY = Option("paper:er8", "--topology", "-t", help=_TOPOLOGY)
STRATEGY = Option("greedy", "--strategy", "-s", help=f"{_STRATEGY}.")
STRATEGY_OR_NONE = Option(
    None, "--strategy", "-s", help=f"{_STRATEGY}; by default greedy, or matcha with --matchings."
)
SWITCH = Option(
    False,
    "--switch",
    help="Charge allreduce and local as behind a switch, not over the topology's links.",
)
PERIOD = Option(
    None,
    help="Iterations H from one round to the next, for local, diloco, noloco, gasloc and "
    "sparseloco; by default as few as the budget allows.",
)
MIXING = Option(
    None,
    help=f"How exchanges become new weights: {_mixing_words()}; by default the strategy's own.",
)
WEIGHTS = Option(None, "--worker-weights", metavar="NUMBER,…", help=f"{_WEIGHTS}.")
WEIGHTS_OR_DATA = Option(
    None,
    "--worker-weights",
    metavar="NUMBER,…|data",
    help=f"{_WEIGHTS}; or data: as many as it has examples.",
)
SEED = Option(0, help="Seed of rounds, searches, first weights and the data's order.")
ALPHA = Option("error", help="What mixing weights are best for: error, or rho as in the paper.")
EFFORT = Option("default", help=_EFFORT)
EFFORT_OR_NONE = Option(None, help=_EFFORT)
WIRE = Option("float32", help=f"{_WIRE}.")
WIRE_OR_PLANS = Option(None, help=f"{_WIRE}; by default float32, or a --plan's own.")

# -- times, always in seconds ----------------------------------------------------------------------

_COMPUTE_TIME = "Seconds that a worker computes per iteration"
COMPUTE_TIME = Option(..., help=f"{_COMPUTE_TIME}.")
COMPUTE_TIME_OR_MEASURED = Option(None, help=f"{_COMPUTE_TIME}; by default as measured here.")
_LINK_TIME = "Seconds of one matching; not needed where the topology has link times."
LINK_TIME = Option(0.01, help=_LINK_TIME)
LINK_TIME_OR_NONE = Option(None, help=_LINK_TIME)
_TIMEOUT = "Seconds after which a silent worker is an error"
TIMEOUT = Option(300.0, help=f"{_TIMEOUT}.")
TIMEOUT_OR_NONE = Option(None, help=f"{_TIMEOUT}; by default as iterations last, 300 at least.")

# -- training --------------------------------------------------------------------------------------

EPOCHS = Option(None, "--epochs", "-e", help="Passes over the data; by default the task's own.")
LEARNING_RATE = Option(
    None, "--learning-rate", "--lr", help="The learning rate; by default the task's own."
)
BATCH_SIZE = Option(None, help="Examples per worker and iteration.")
MOMENTUM = Option(
    "local",
    help="How momentum goes with meetings: local, quasi-global, exact-diffusion, outer, "
    "tracking, momentum-tracking, shared or auto.",
)
MODEL = Option(None, help="Another model than the task's own, such as resnet20.")
PARTITION = Option(
    "iid",
    help="How data are dealt to workers: iid, shards, dirichlet or dirichlet-even; text: iid, "
    "documents or folders.",
)
DATA = Option(None, help="Folder of the data sets; by default $MATCHA_DATA.")
DEVICE = Option("auto", help="Where to compute: auto, cpu or cuda.")
COMPILE = Option(False, "--compile", help="CUDA: compile the model's blocks.")
OVERLAP = Option(False, "--overlap", help="The exchange runs while the gradient is computed.")
CLIP = Option(
    None,
    help="The furthest that a meeting moves a worker, as a multiple of the disagreement that "
    "the plan predicts: against workers that send garbage. 1 is a good choice.",
)

# -- what is written -------------------------------------------------------------------------------


def folder(default: str | None = None) -> Any:
    """Where results go."""
    text = "Folder to write to." if default else "Folder to write to; by default below runs/."
    return Option(default, "--output", "-o", help=text)


PLAN_FILE = Option(None, "--output", "-o", help="Save the plan to this JSON file.")
PLOT = Option(None, help="Draw it to a .png, .svg or .pdf file.")
REPORT = Option(True, "--report/--no-report", help="Write a page for the browser at the end.")
SERVE = Option(
    None,
    metavar="[HOST:]PORT",
    help="Show the run in a browser while it goes; 0 is any free port. Another HOST than this "
    "machine needs the token that is printed.",
)
RESUME = Option(False, "--resume", help="Go on with a run that was stopped.")
FORCE = Option(False, "--force", help="Overwrite the output files.")
JSON = Option(False, "--json", help="Print JSON, for machines, instead.")

# -- what was given --------------------------------------------------------------------------------

BEST_FOR = {"error": "the consensus error", "rho": "rho, as in the paper"}


def check_alpha(alpha: str) -> None:
    """Refuse what weights cannot be best for."""
    if alpha not in BEST_FOR:
        raise unknown_name("alpha", alpha, BEST_FOR)


def given(context: typer.Context, names: Iterable[str]) -> list[str]:
    """Those of a command's options that stand on its command line, as they are written there."""
    return [
        parameter.opts[0] if parameter.opts[0].startswith("-") else f"the {parameter.name}"
        for parameter in context.command.params
        if parameter.name in set(names)
        and (source := context.get_parameter_source(parameter.name or "")) is not None
        and source.name == "COMMANDLINE"
    ]


def taken(context: typer.Context, names: str) -> dict[str, Any]:
    """Options as arguments of a function that calls them by the same names."""
    return {name: context.params[name] for name in names.split()}


def refuse(context: typer.Context, names: Iterable[str], why: str) -> None:
    """Refuse options that were given and would be ignored, all in one sentence."""
    options = given(context, names)
    if options:
        listed = " and ".join([", ".join(options[:-1]), options[-1]] if options[1:] else options)
        raise InputError(f"{listed} {'are' if options[1:] else 'is'} {why}")


def with_period(names: Sequence[str], period: int | None) -> dict[str, int]:
    """The option of strategies that take a period."""
    if period is None:
        return {}
    able = [name for name, strategy in STRATEGIES.items() if "period" in strategy.options()]
    if not set(able) & set(names):
        raise InputError(f"--period is for {', '.join(able)}: leave it out, or add one of them.")
    return {"period": period}


def weighted(plan: PlanLike, weights: str | None, task: TaskSpec) -> PlanLike:
    """The plan with weights of workers; `data`: the examples that each has of the task."""
    if weights is None:
        return plan
    if weights == "data":
        parts = getattr(task.make(), "parts", None)
        if parts is None:
            raise InputError(
                f"the task {task.name} shares no examples out: give --worker-weights numbers."
            )
        found = [float(len(part)) for part in parts]
    else:
        found = numbers([weights], "--worker-weights")
    assert isinstance(plan, Plan), "saved plans, which may have stages, bring their own weights"
    return replace(plan, worker_weights=tuple(found))


def words(texts: Iterable[str]) -> list[str]:
    """The words of an option that was given several times, with commas, or both.

    >>> words(["vanilla, greedy", "matcha"])
    ['vanilla', 'greedy', 'matcha']
    """
    return [word.strip() for text in texts for word in text.split(",") if word.strip()]


def numbers(texts: Iterable[str], option: str = "--budget", kind: Any = float) -> list[Any]:
    """The numbers of an option that was given several times, with commas, or both.

    >>> numbers(["0.1,0.5", "1"]), numbers(["0,1", "2"], "--seed", int)
    ([0.1, 0.5, 1.0], [0, 1, 2])
    """
    try:
        return [kind(word) for word in words(texts)]
    except ValueError:
        given, what = ",".join(texts), "whole numbers" if kind is int else "numbers"
        raise InputError(f"{option} is {given!r}, but it is {what} separated by commas.") from None
