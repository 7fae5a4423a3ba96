"""The strategies there are: how each makes its plan, what it takes, and how it is drawn.

The one list: Python, the command line, reports and their pages read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from matcha.errors import unknown_name
from matcha.plans import Plan
from matcha.rounds import MIXINGS, Mixing
from matcha.strategies import base, exact, finite_time, own, periodic, silent, vanilla
from matcha.strategies.request import DECOMPOSITIONS, Decomposition, Request

_OWN_COLOR, _OWN_MARKER = "#666666", "o"
Builder = Callable[[Request], Plan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One way to make a plan."""

    name: str
    about: str
    """In a few words, for help texts."""
    build: Builder = field(repr=False)
    mixings: tuple[Mixing, ...]
    """What it can mix by, its own choice first."""
    compared: bool = False
    """Whether sweeps, pages and the demo show it unasked."""
    needs_rounds: bool = False
    """Whether the user must bring the rounds: a name alone is not enough."""
    is_control: bool = False
    """Whether it is there for comparison only and can win none."""
    has_budget: bool = True
    """Whether the budget decides anything; without, its plans stand once in a sweep, at 1."""
    decompositions: tuple[Decomposition, ...] = ("matchings",)
    takes_probabilities: bool = False
    color: str
    """In figures, on white."""
    page_colors: tuple[str, str]
    """On a report's page, light and dark, with contrast enough for both."""
    marker: str
    """As matplotlib calls it."""

    @property
    def takes_wire(self) -> bool:
        """Whether its messages can be smaller; an exact average's are whole, silence has none."""
        return not self.is_control and self.mixings != ("average",)

    def budgets(self, wanted: Iterable[float]) -> list[float]:
        """The budgets of a sweep at which it has a plan of its own, rising."""
        return sorted(set(wanted)) if self.has_budget else [1.0]


def _matcha(request: Request) -> Plan:
    # These three search; their machinery is imported by those who plan with them only.
    from matcha.strategies import matcha

    return matcha.build(request)


def _single(request: Request) -> Plan:
    from matcha.strategies import single

    return single.build(request)


def _greedy(request: Request) -> Plan:
    from matcha.strategies import greedy

    return greedy.build(request)


def _one_peer(request: Request) -> Plan:
    from matcha.strategies import one_peer

    return one_peer.build(request)


def _ceca(request: Request) -> Plan:
    from matcha.strategies import ceca

    return ceca.build(request)


# Colours: Okabe and Ito's palette, told apart by colour-blind readers too.
_ALL = (
    Strategy(
        name="vanilla",
        compared=True,
        about="all links at every iteration",
        build=vanilla.build,
        mixings=("laplacian",),
        has_budget=False,
        color="#000000",
        page_colors=("#30363d", "#c9d1d9"),
        marker="x",
    ),
    Strategy(
        name="periodic",
        compared=True,
        about="all links, every so often",
        build=periodic.build,
        mixings=("laplacian",),
        color="#D55E00",
        page_colors=("#d55e00", "#ff9d57"),
        marker="^",
    ),
    Strategy(
        name="matcha",
        compared=True,
        about="each matching by a coin of its own (the paper)",
        build=_matcha,
        mixings=("laplacian", "pairwise"),
        decompositions=DECOMPOSITIONS,
        takes_probabilities=True,
        color="#0072B2",
        page_colors=("#0072b2", "#5fb7ec"),
        marker="o",
    ),
    Strategy(
        name="greedy",
        compared=True,
        about="the matchings that remove most disagreement, as a cycle",
        build=_greedy,
        mixings=("pairwise", "push"),
        color="#009E73",
        page_colors=("#00875f", "#46cf9f"),
        marker="s",
    ),
    Strategy(
        name="allreduce",
        compared=True,
        about="the exact average at every iteration, as DDP has it",
        build=exact.allreduce,
        mixings=("average",),
        has_budget=False,
        color="#7A4FBF",
        page_colors=("#a33b3b", "#f09090"),
        marker="p",
    ),
    Strategy(
        name="local",
        compared=True,
        about="the exact average every so often (local SGD)",
        build=exact.local,
        mixings=("average",),
        color="#A6761D",
        page_colors=("#8a4b00", "#e0a25e"),
        marker="h",
    ),
    Strategy(
        name="silent",
        compared=True,
        about="no communication at all: a control",
        build=silent.build,
        mixings=("pairwise",),
        has_budget=False,
        is_control=True,
        color="#999999",
        page_colors=("#767b76", "#9aa39a"),
        marker="+",
    ),
    Strategy(
        name="single",
        about="at most one matching an iteration, drawn",
        build=_single,
        mixings=("laplacian", "pairwise"),
        takes_probabilities=True,
        color="#CC79A7",
        page_colors=("#b3508a", "#f09cca"),
        marker="D",
    ),
    Strategy(
        name="hypercube",
        about="one dimension of a hypercube after another: exact consensus every log2(m) rounds",
        build=finite_time.hypercube,
        mixings=("pairwise",),
        color="#E69F00",
        page_colors=("#8a6d00", "#e3c04b"),
        marker="v",
    ),
    Strategy(
        name="base",
        about="groups of at most b: exact consensus in about 2 log_b(m) rounds, for any m",
        build=base.build,
        mixings=("laplacian", "pairwise"),
        color="#56B4E9",
        page_colors=("#6b4fb5", "#b7a2f5"),
        marker="P",
    ),
    Strategy(
        name="one-peer",
        about="everyone sends 1, 2, 4, … places on: the one-peer exponential graph",
        build=_one_peer,
        mixings=("push",),
        color="#F0E442",
        page_colors=("#6f7d00", "#d4e157"),
        marker="<",
    ),
    Strategy(
        name="ceca",
        about="sums that hop: the exact mean of any m by ⌈log2 m⌉ messages at once",
        build=_ceca,
        mixings=("windows",),
        color="#1B9E9E",
        page_colors=("#0f7c7c", "#5fd3d3"),
        marker=">",
    ),
    Strategy(
        name="rounds",
        about="your own list of rounds, repeated",
        build=own.build,
        needs_rounds=True,
        mixings=("pairwise", "laplacian", "push"),
        has_budget=False,
        color="#8C6D31",
        page_colors=("#7a5c3e", "#d0ae8a"),
        marker="*",
    ),
)

STRATEGIES: Mapping[str, Strategy] = {strategy.name: strategy for strategy in _ALL}
"""By name, in the order in which they are shown."""


OFFERED = tuple(strategy.name for strategy in _ALL if not strategy.needs_rounds)
"""What can be asked for by name alone, as on the command line."""
COMPARED = tuple(strategy.name for strategy in _ALL if strategy.compared)
"""What is compared where nobody says otherwise."""


def strategy_named(name: str) -> Strategy:
    """The strategy of a name.

    Raises:
        InputError: There is none; suggests the nearest.

    >>> strategy_named("vanilla").has_budget
    False
    """
    if name not in STRATEGIES:
        raise unknown_name("strategy", str(name), STRATEGIES)
    return STRATEGIES[name]


def own_strategy(name: str, build: Builder) -> Strategy:
    """A user's function as a strategy; it may use whatever was asked for."""
    return Strategy(
        name=name,
        about="your own",
        build=build,
        mixings=MIXINGS,
        decompositions=DECOMPOSITIONS,
        takes_probabilities=True,
        color=_OWN_COLOR,
        page_colors=("#555c52", "#a9b1a6"),
        marker=_OWN_MARKER,
    )


def look_of(name: str) -> tuple[str, str]:
    """The colour and the marker that a strategy is drawn with; grey dots for a user's own."""
    known = STRATEGIES.get(name)
    return (_OWN_COLOR, _OWN_MARKER) if known is None else (known.color, known.marker)


def has_budget(name: str) -> bool:
    """Whether a strategy's budget decides anything; a user's own has one."""
    return name not in STRATEGIES or STRATEGIES[name].has_budget


def is_control(name: str) -> bool:
    """Whether a strategy is there for comparison only."""
    return name in STRATEGIES and STRATEGIES[name].is_control


def with_budget(name: str, budget: float) -> str:
    """A strategy and its budget, where it has one.

    >>> with_budget("greedy", 0.1), with_budget("vanilla", 1.0)
    ('greedy 0.1', 'vanilla')
    """
    return f"{name} {budget:g}" if has_budget(name) else name
