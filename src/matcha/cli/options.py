"""Options that several commands share: each is spelled, and means, the same everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from matcha.errors import InputError, unknown_name
from matcha.plans import Plan, PlanLike
from matcha.rounds import Mixing
from matcha.strategies import EFFORTS, OFFERED, STRATEGIES
from matcha.wires import WIRES

if TYPE_CHECKING:
    from matcha.training.task import TaskSpec

_N = TypeVar("_N", int, float)
_TOPOLOGY = (
    "Which workers can talk to which: [cyan]ring:8[/], [cyan]path:8[/], [cyan]torus:4x4[/], "
    "[cyan]hypercube:4[/], [cyan]star:8[/], [cyan]complete:8[/], [cyan]barbell:8[/], "
    "[cyan]erdos-renyi:16:0.3:SEED[/], [cyan]geometric:16:0.4:SEED[/], a graph of the paper "
    "([cyan]paper:er8[/], [cyan]paper:geometric16-d5|d10|d13[/], [cyan]paper:er16[/]), or a file "
    "(CSV, JSON, GraphML, edge list, or adjacency matrix as .npy)."
)
_BUDGET = "Communication as a fraction of vanilla's, C_b in (0, 1]"
_STRATEGY = f"How the plan is made: {', '.join(OFFERED)}, or your own as MODULE:FUNCTION"
_SEVERAL = "several with commas, or the option again."


def _mixing_words() -> str:
    """The mixings that can be asked for, each with the strategies that take it."""
    found: dict[Mixing, list[str]] = {}
    for name in OFFERED:
        strategy = STRATEGIES[name]
        for mixing in strategy.mixings if "mixing" in strategy.options() else ():
            found.setdefault(mixing, []).append(name)
    return "; ".join(f"{mixing} ({', '.join(names)})" for mixing, names in found.items())


MIXING_WORDS = f"How exchanges become new weights: {_mixing_words()}"

# -- the network and what may be spent on it -------------------------------------------------------

TopologyArgument = Annotated[str, typer.Argument(metavar="TOPOLOGY", help=_TOPOLOGY)]
TopologyOption = Annotated[str, typer.Option("--topology", "-t", help=_TOPOLOGY)]
Budget = Annotated[float, typer.Option("--budget", "-b", help=f"{_BUDGET}.")]
Budgets = Annotated[
    list[str], typer.Option("--budget", "-b", metavar="NUMBER,…", help=f"{_BUDGET}; {_SEVERAL}")
]
Switch = Annotated[
    bool,
    typer.Option(
        "--switch",
        help="Charge allreduce and local as behind a switch, not over the topology's links.",
    ),
]
Period = Annotated[
    int | None,
    typer.Option(
        "--period",
        help="Iterations H from one round to the next, for local, diloco, noloco, gasloc and "
        "sparseloco; by default as few as the budget allows.",
    ),
]
_WEIGHTS = "How much each worker counts, with SGD: a number for each, with commas"
WorkerWeights = Annotated[
    str | None, typer.Option("--worker-weights", metavar="NUMBER,…", help=f"{_WEIGHTS}.")
]
WorkerWeightsOrData = Annotated[
    str | None,
    typer.Option(
        "--worker-weights",
        metavar="NUMBER,…|data",
        help=f"{_WEIGHTS}; or data: as many as it has examples.",
    ),
]
Strategy = Annotated[str, typer.Option("--strategy", "-s", help=f"{_STRATEGY}.")]
StrategyOrNone = Annotated[
    str | None,
    typer.Option(
        "--strategy", "-s", help=f"{_STRATEGY}; by default greedy, or matcha with --matchings."
    ),
]
Strategies = Annotated[
    list[str], typer.Option("--strategy", "-s", metavar="TEXT,…", help=f"{_STRATEGY}; {_SEVERAL}")
]
Seed = Annotated[
    int,
    typer.Option("--seed", help="Seed of rounds, searches, first weights and the data's order."),
]
Seeds = Annotated[
    list[str],
    typer.Option(
        "--seed", metavar="INTEGER,…", help=f"Seeds of rounds, weights and data; {_SEVERAL}"
    ),
]
_EFFORT = f"How long matcha and greedy search: {', '.join(EFFORTS[:-1])} or {EFFORTS[-1]}."
Alpha = Annotated[
    str,
    typer.Option(
        "--alpha", help="What mixing weights are best for: error, or rho as in the paper."
    ),
]
Effort = Annotated[str, typer.Option("--effort", help=_EFFORT)]
EffortOrNone = Annotated[str | None, typer.Option("--effort", help=_EFFORT)]

_WIRE = (
    f"What messages hold: {', '.join(WIRES[:-1])} or lowrank:R; smaller messages buy more rounds"
)
Wire = Annotated[str, typer.Option("--wire", help=f"{_WIRE}.")]
WireOrPlans = Annotated[
    str | None, typer.Option("--wire", help=f"{_WIRE}; by default float32, or a --plan's own.")
]
Wires = Annotated[list[str], typer.Option("--wire", metavar="TEXT,…", help=f"{_WIRE}; {_SEVERAL}")]

# -- times, always in seconds ----------------------------------------------------------------------

_LINK_TIME = "Seconds of one matching; not needed where the topology has link times."
ComputeTime = Annotated[
    float, typer.Option("--compute-time", help="Seconds that a worker computes per iteration.")
]
ComputeTimeOrMeasured = Annotated[
    float | None,
    typer.Option(
        "--compute-time",
        help="Seconds that a worker computes per iteration; by default as measured here.",
    ),
]
LinkTime = Annotated[float, typer.Option("--link-time", help=_LINK_TIME)]
Latency = Annotated[
    float,
    typer.Option(
        "--latency",
        help="Seconds of --link-time that a message of any size takes; no wire saves them.",
    ),
]
LinkTimeOrNone = Annotated[float | None, typer.Option("--link-time", help=_LINK_TIME)]
_TIMEOUT = "Seconds after which a silent worker is an error"
Timeout = Annotated[float, typer.Option("--timeout", help=f"{_TIMEOUT}.")]
TimeoutOrNone = Annotated[
    float | None,
    typer.Option("--timeout", help=f"{_TIMEOUT}; by default as iterations last, 300 at least."),
]
Explore = Annotated[
    bool,
    typer.Option(
        "--explore", help="Plan all compared strategies at many budgets, for a slider on the page."
    ),
]

# -- training --------------------------------------------------------------------------------------

Epochs = Annotated[
    int | None,
    typer.Option("--epochs", "-e", help="Passes over the data; by default the task's own."),
]
LearningRate = Annotated[
    float | None,
    typer.Option("--learning-rate", "--lr", help="The learning rate; by default the task's own."),
]
BatchSize = Annotated[
    int | None, typer.Option("--batch-size", help="Examples per worker and iteration.")
]
Momentum = Annotated[
    str,
    typer.Option(
        "--momentum",
        help="How momentum goes with meetings: local, quasi-global, exact-diffusion, outer, "
        "tracking, momentum-tracking, shared or auto.",
    ),
]
Model = Annotated[
    str | None, typer.Option("--model", help="Another model than the task's own, such as resnet20.")
]
Partition = Annotated[
    str,
    typer.Option(
        "--partition",
        help="How data are dealt to workers: iid, shards, dirichlet or dirichlet-even; text: iid, "
        "documents or folders.",
    ),
]
Data = Annotated[
    Path | None, typer.Option("--data", help="Folder of the data sets; by default $MATCHA_DATA.")
]
Device = Annotated[str, typer.Option("--device", help="Where to compute: auto, cpu or cuda.")]
Compile = Annotated[bool, typer.Option("--compile", help="CUDA: compile the model's blocks.")]
Overlap = Annotated[
    bool, typer.Option("--overlap", help="The exchange runs while the gradient is computed.")
]

# -- what is written -------------------------------------------------------------------------------

Folder = Annotated[Path, typer.Option("--output", "-o", help="Folder to write to.")]
FolderOrNone = Annotated[
    Path | None, typer.Option("--output", "-o", help="Folder to write to; by default below runs/.")
]
PlanFile = Annotated[
    Path | None, typer.Option("--output", "-o", help="Save the plan to this JSON file.")
]
Plot = Annotated[Path | None, typer.Option("--plot", help="Draw it to a .png, .svg or .pdf file.")]
Report = Annotated[
    bool, typer.Option("--report/--no-report", help="Write a page for the browser at the end.")
]
Serve = Annotated[
    str | None,
    typer.Option(
        metavar="[HOST:]PORT",
        help="Show the run in a browser while it goes; 0 is any free port. Another HOST than this "
        "machine needs the token that is printed.",
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped.")]
Clip = Annotated[
    float | None,
    typer.Option(
        "--clip",
        help="The furthest that a meeting moves a worker, as a multiple of the disagreement that "
        "the plan predicts: against workers that send garbage. 1 is a good choice.",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the output files.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for machines, instead.")]


def given(context: typer.Context, names: Iterable[str]) -> list[str]:
    """Those of a command's options that stand on its command line, as they are written there."""
    return [
        parameter.opts[0] if parameter.opts[0].startswith("-") else f"the {parameter.name}"
        for parameter in context.command.params
        if parameter.name in set(names)
        and (source := context.get_parameter_source(parameter.name or "")) is not None
        and source.name == "COMMANDLINE"
    ]


def with_period(names: Sequence[str], period: int | None) -> dict[str, int]:
    """The option of strategies that take a period."""
    if period is None:
        return {}
    able = [name for name, strategy in STRATEGIES.items() if "period" in strategy.options()]
    if not set(able) & set(names):
        raise InputError(f"--period is for {', '.join(able)}: leave it out, or add one of them.")
    return {"period": period}


def weighted(plan: PlanLike, weights: str | None, task: TaskSpec) -> PlanLike:
    """The plan with weights of workers; `data`: the examples that each has of the task.

    Raises:
        InputError: They are no weights of these workers, or the task shares no examples.
    """
    if weights is None:
        return plan
    if weights == "data":
        parts = getattr(task.make(), "parts", None)
        if parts is None:
            raise InputError(
                f"the task {task.name} shares no examples out: give --worker-weights numbers."
            )
        found = tuple(float(len(part)) for part in parts)
    else:
        found = tuple(numbers([weights], "--worker-weights"))
    assert isinstance(plan, Plan), "saved plans, which may have stages, bring their own weights"
    return replace(plan, worker_weights=found)


BEST_FOR = {"error": "the consensus error", "rho": "rho, as in the paper"}


def check_alpha(alpha: str) -> None:
    """Refuse what weights cannot be best for."""
    if alpha not in BEST_FOR:
        raise unknown_name("alpha", alpha, BEST_FOR)


def refuse(context: typer.Context, names: Iterable[str], why: str) -> None:
    """Refuse options that were given and would be ignored, all in one sentence."""
    options = given(context, names)
    if options:
        listed = " and ".join([", ".join(options[:-1]), options[-1]] if options[1:] else options)
        raise InputError(f"{listed} {'are' if options[1:] else 'is'} {why}")


def words(texts: Iterable[str]) -> list[str]:
    """The words of an option that was given several times, with commas, or both.

    >>> words(["vanilla, greedy", "matcha"])
    ['vanilla', 'greedy', 'matcha']
    """
    return [word.strip() for text in texts for word in text.split(",") if word.strip()]


def numbers(texts: Iterable[str], option: str = "--budget") -> list[float]:
    """The numbers of an option that was given several times, with commas, or both.

    >>> numbers(["0.1,0.5", "1"])
    [0.1, 0.5, 1.0]
    """
    return _parsed(texts, option, float, "numbers")


def whole_numbers(texts: Iterable[str], option: str) -> list[int]:
    """The whole numbers of an option, each of them once.

    >>> whole_numbers(["0,1", "2"], "--seed")
    [0, 1, 2]
    """
    found = _parsed(texts, option, int, "whole numbers")
    if not found or len(set(found)) < len(found):
        raise InputError(f"{option} is {','.join(texts)!r}: name each choice once.")
    return found


def _parsed(texts: Iterable[str], option: str, kind: Callable[[str], _N], what: str) -> list[_N]:
    try:
        return [kind(word) for word in words(texts)]
    except ValueError:
        given = ",".join(texts)
        raise InputError(f"{option} is {given!r}, but it is {what} separated by commas.") from None
