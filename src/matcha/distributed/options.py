"""Options: how a Gossip exchanges, and the one table of what does not go together.

Errors are raised from `EXCLUSIONS`, and the table in docs/limits.md is made from it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from matcha.distributed.exchange.buckets import is_sharded
from matcha.distributed.launch.placement import JOIN_VARIABLE, LOSS_VARIABLE, REPLAN_VARIABLE
from matcha.distributed.links.transport import LinkTransport
from matcha.distributed.transports.base import Transport
from matcha.errors import InputError
from matcha.plans import Plan, PlanLike, StagedPlan
from matcha.rounds import ONE_WAY
from matcha.strategies import STRATEGIES
from matcha.strategies.planning import check_growable
from matcha.training.clipping import check_clip
from matcha.training.momentum import Momentum, parse_momentum
from matcha.wires import Float, LowRank, TopK


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipOptions:
    """How a `Gossip` exchanges. All workers must choose the same, except for `timeout`.

    `Gossip` takes each of them as a keyword as well: `Gossip(model, optimizer, plan, overlap=True)`
    is `Gossip(model, optimizer, plan, options=GossipOptions(overlap=True))`.

    Raises:
        InputError: a value is one that no option takes.
    """

    overlap: bool = False
    """Exchange while the gradient is computed, x ← Wx − ηg (the paper's footnote). Exact, not
    stale; parameters must then change only in `optimizer.step()`."""
    asynchronous: bool = False
    """Meet when both ends have time, instead of waiting for a slow partner: what a meeting moves is
    added at each end's next step (see `exchange.background`)."""
    momentum: str | Momentum = "local"
    """Around meetings: one of `matcha.training.momentum.MOMENTA`."""
    buffers: Literal["local", "average"] = "local"
    """`local` keeps BatchNorm's statistics; `average` mixes them like parameters."""
    bucket_cap_mb: float = 25.0
    """Size of a bucket in megabytes."""
    timeout: float | None = None
    """Seconds after which a silent partner is an error. By default it follows how long iterations
    take, twice the sum of their median and four standard deviations, and is at least 300 (in a
    meeting 30, with `on_loss="continue"`)."""
    on_loss: Literal["stop", "continue"] | None = None
    """`stop` ends training with the name of a worker that is gone; `continue` goes on without it,
    and takes it in again when it comes back. By default what the launcher says, or `stop`."""
    replan: int | None = None
    """Iterations after which workers compare how long links took, and plan again where one is off
    by half; 0 is never. By default what the launcher says, or never."""
    join: str | None = None
    """HOST:PORT of any worker of a running team, in which this worker takes part from now on; the
    plan is then the team's. By default what the launcher says, or a start with all others."""
    clip: float | None = None
    """The furthest that a meeting may move this worker, in multiples of the disagreement that the
    plan predicts (1 is a good choice), against workers that send garbage; None: no bound."""

    def __post_init__(self) -> None:
        parse_momentum(self.momentum)
        if self.buffers not in ("local", "average"):
            raise InputError(f"buffers is {self.buffers!r}, but it is 'local' or 'average'.")
        if self.on_loss not in ("stop", "continue", None):
            raise InputError(f"on_loss is {self.on_loss!r}, but it is 'stop' or 'continue'.")
        for name in ("bucket_cap_mb", "timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InputError(f"{name} is {value}, but it must be positive.")
        if self.replan is not None and not (isinstance(self.replan, int) and self.replan >= 0):
            raise InputError(
                f"replan is {self.replan}, but it is a number of iterations, or 0 for never."
            )
        if self.join is not None and self.on_loss == "stop":
            raise InputError(
                "a worker joins a team that goes on without those it loses: leave on_loss out."
            )
        if self.clip is not None:
            check_clip(self.clip)

    def with_launcher(self) -> GossipOptions:
        """Fill in what the script leaves to the launcher: `on_loss`, `replan` and `join`."""
        join = self.join or os.environ.get(JOIN_VARIABLE) or None
        usual = "stop" if join is None else "continue"
        on_loss: Any = self.on_loss or os.environ.get(LOSS_VARIABLE, usual)
        replan: Any = self.replan
        if replan is None:
            text = os.environ.get(REPLAN_VARIABLE, "0")
            replan = int(text) if text.isdigit() else text
        return replace(self, on_loss=on_loss, replan=replan, join=join)

    def describe(self) -> str:
        """Return the options that must be the same on all workers, as text to compare."""
        names = [field.name for field in fields(self) if field.name not in ("timeout", "join")]
        return ", ".join(f"{name} {getattr(self, name)}" for name in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A Gossip's options and what they are used with: what the exclusions look at."""

    options: GossipOptions
    plan: PlanLike
    momentum: Momentum = Momentum()  # noqa: RUF009  (frozen)
    """The momentum asked for, with `auto` decided."""
    model: nn.Module | None = None
    optimizers: Sequence[Any] = ()
    """The optimizers as the script gave them."""
    has_mesh: bool = False
    transport_given: bool = False
    transport: Transport | None = None
    """Once there is one."""
    num_parts: int = 1
    """Processes per worker."""
    others: tuple[GossipOptions, ...] = ()
    """Of other Gossips that use the transport."""
    call: str = ""
    """A method of Gossip that is called, such as `join`, or `train` for a task; `grow` to ask
    whether workers may join and leave for good."""


@dataclass(frozen=True, slots=True)
class Feature:
    """Something that a script may choose."""

    name: str
    is_in: Callable[[Setup], bool]
    remedy: str = ""
    """What to do instead."""


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Two choices that do not go together, and why."""

    first: Feature
    second: Feature
    cause: str

    @property
    def reason(self) -> str:
        """The cause and what to do instead, as the end of a sentence."""
        remedies = ", or ".join(filter(None, (self.first.remedy, self.second.remedy)))
        return f"{self.cause}: {remedies}"

    @property
    def message(self) -> str:
        """The sentence of the error."""
        names = f"{self.first.name} does not go with {self.second.name}".replace("`", "")
        return f"{names}: {self.reason}."


def find_exclusion(setup: Setup) -> Exclusion | None:
    """Return the first exclusion that a setup runs into; None where all goes together."""
    return next((e for e in EXCLUSIONS if e.first.is_in(setup) and e.second.is_in(setup)), None)


def check_setup(setup: Setup) -> None:
    """Refuse choices that do not go together."""
    if (found := find_exclusion(setup)) is not None:
        raise InputError(found.message)


# -- the choices -----------------------------------------------------------------------------------


def _is_fixed(setup: Setup) -> bool:
    """Whether nothing in the plan depends on how long links take."""
    if not isinstance(setup.plan, Plan):
        return False
    strategy = STRATEGIES.get(setup.plan.strategy)
    return strategy is None or not strategy.has_budget or strategy.needs_rounds


def _cannot_be_made_again(setup: Setup) -> bool:
    try:
        check_growable(setup.plan)
    except InputError:
        return True
    return False


def _mixings(setup: Setup) -> set[str]:
    return {level.mixing for level in setup.plan.levels}


def _is_sharded(setup: Setup) -> bool:
    return setup.model is not None and any(is_sharded(p) for p in setup.model.parameters())


def _is_beside(setup: Setup) -> bool:
    return any(one.overlap or one.asynchronous for one in (setup.options, *setup.others))


def _momentum(kind: str) -> Feature:
    name = f'`momentum="{kind}"`'
    return Feature(name, lambda s: s.momentum.kind == kind, "use another momentum")


def _momentum_but(name: str, *kinds: str) -> Feature:
    return Feature(name, lambda s: s.momentum.kind not in kinds, "leave momentum at 'local'")


def _called(name: str, call: str, remedy: str) -> Feature:
    return Feature(name, lambda s: s.call == call, remedy)


_USE_GREEDY = "make the plan with greedy, whose messages come round"
_TAKE_TURNS = "detach() the first, or give each a transport of its own"
_SAVE = "use save() and load()"
_OWN_LOOP = "give asynchronous=True to Gossip, in a loop of your own"
_WHILE = "loop `while gossip.iteration < last` and call the Recorder every so many iterations"
_LIVE_PLAN = "use greedy, matcha, periodic or another strategy with a budget"
_GROWING_PLAN = "use greedy, matcha, vanilla or periodic, with links that carry both ways"
_OWN_LINKS = "give Gossip a LinkTransport, or start with `matcha train --links`"

OVERLAP = Feature("`overlap=True`", lambda s: s.options.overlap, "leave overlap out")
ASYNCHRONOUS = Feature(
    "`asynchronous=True`", lambda s: s.options.asynchronous, "leave asynchronous out"
)
BESIDE = Feature("`overlap=True` or `asynchronous=True`", _is_beside)
MOMENTUM = _momentum_but("outer steps, or a momentum other than `local`", "local")
OTHER_MOMENTUM = _momentum_but("a momentum other than `local` and `outer`", "local", "outer")
FOLLOWED = _momentum_but(
    "a momentum other than `local` and `quasi-global`", "local", "quasi-global"
)
RATE_FIRST = Feature(
    "outer steps with the rate first (`gasloc`)",
    lambda s: s.momentum.kind == "outer" and s.momentum.rate_first,
    "use noloco",
)
TRACKING = _momentum("tracking")
MOMENTUM_TRACKING = _momentum("momentum-tracking")
EXACT_DIFFUSION = _momentum("exact-diffusion")
SHARED = _momentum("shared")
CLIP = Feature("`clip`", lambda s: s.options.clip is not None, "leave clip out")
REPLAN = Feature("`replan`", lambda s: bool(s.options.replan), "leave replan out")
CONTINUE = Feature(
    '`on_loss="continue"`', lambda s: s.options.on_loss == "continue", "leave on_loss at 'stop'"
)
MESH = Feature("`mesh`", lambda s: s.has_mesh, "leave mesh out")
GROUP = Feature(
    "workers of several processes (`mesh`)", lambda s: s.num_parts > 1, "leave mesh out"
)
SHARDED = Feature("sharded parameters", _is_sharded)
TRANSPORT = Feature("`transport`", lambda s: s.transport_given, "leave transport out")
SHARED_TRANSPORT = Feature(
    "another Gossip over the same transport", lambda s: bool(s.others), _TAKE_TURNS
)
ONE_THREAD = Feature(
    "a transport for one thread (MPI, NCCL)",
    lambda s: s.transport is not None and not s.transport.threads,
    "choose gloo or links of our own (LinkTransport)",
)
NO_LINKS = Feature(
    "a transport that does not know who is gone",
    lambda s: s.transport is not None and not isinstance(s.transport, LinkTransport),
    _OWN_LINKS,
)
NO_OPTIMIZER = Feature("`optimizer=None`", lambda s: not s.optimizers, "give Gossip the optimizer")
SEVERAL_GRADIENTS = Feature(
    "an optimizer with several gradients per step (LBFGS, SAM)",
    lambda s: any(isinstance(o, torch.optim.LBFGS) or _perturbs(o) for o in s.optimizers),
)
LBFGS = Feature("LBFGS", lambda s: any(isinstance(o, torch.optim.LBFGS) for o in s.optimizers))
NOT_SGD = Feature(
    "an optimizer other than SGD",
    lambda s: any(type(wrapped_by(o) or o).__name__ != "SGD" for o in s.optimizers),
    "use SGD",
)
TASK = _called("training a task", "train", _OWN_LOOP)
JOIN = _called("`join()`", "join", "leave join() out, and let all take as many steps")
EPOCHS = _called("`Recorder.epochs()`", "epochs", _WHILE)
LOAD_STATE = _called("`load_state_dict()`", "load_state_dict", _SAVE)
GROWTH = Feature(
    "workers that join or leave for good (`join=`, `leave()`)",
    lambda s: s.options.join is not None or s.call == "grow",
)
OUTER_PLAN = Feature(
    "a plan with outer steps", lambda s: s.plan.outer is not None, "use another strategy"
)
SET_PLAN = Feature(
    "a plan that cannot be made for other workers", _cannot_be_made_again, _GROWING_PLAN
)
STAGES = Feature(
    "a plan with stages of its own",
    lambda s: isinstance(s.plan, StagedPlan),
    "start with one plan",
)
FIXED_PLAN = Feature(
    "a plan in which nothing depends on how long links take", _is_fixed, _LIVE_PLAN
)
DIRECTED = Feature("links that carry one way", lambda s: s.plan.topology.directed)
ONE_WAY_LINKS = Feature(
    "one-way links or messages", lambda s: s.plan.topology.directed or "push" in _mixings(s)
)
ONE_WAY_ROUNDS = Feature(
    "a plan of one-way messages",
    lambda s: bool(_mixings(s) & set(ONE_WAY)),
    "plan with pairwise or laplacian mixing",
)
NO_MEETINGS = Feature(
    "a plan that pushes, relays, or averages all workers",
    lambda s: bool(_mixings(s) & {"push", "average", "relay"}),
)
NOT_PAIRS = Feature(
    "a plan whose workers do not meet in pairs",
    lambda s: not _mixings(s) <= {"laplacian", "pairwise"},
    "choose a plan of pairs, with both ways on every link",
)
PUSH_SUM = Feature(
    "a plan that needs push-sum",
    lambda s: any(level.needs_push_sum for level in s.plan.levels),
    _USE_GREEDY,
)
RELAY = Feature("a plan of relayed sums (relaysum)", lambda s: "relay" in _mixings(s), "use greedy")
WEIGHTS = Feature(
    "a plan with `worker_weights`",
    lambda s: s.plan.worker_weights is not None,
    "plan without worker_weights",
)
LOW_RANK = Feature(
    "a low-rank wire", lambda s: isinstance(s.plan.wire, LowRank), "use another wire"
)
CODED_WIRE = Feature(
    "a wire that sends less than whole values",
    lambda s: not isinstance(s.plan.wire, Float),
    "choose the wire float32 or bfloat16",
)
NOT_WHOLE = Feature(
    "a wire other than float32", lambda s: s.plan.wire != Float(), "leave the wire at float32"
)
TOP_K = Feature(
    'a top-k wire (`sparseloco`, `wire="topk:64"`)',
    lambda s: isinstance(s.plan.wire, TopK),
    "use another wire",
)

_STEP_FIRST = "it changes the step before the round, but with overlap the round comes first"
_OF_ALL = "they are of all workers at all iterations"
_CORRECTED = "each iteration is corrected, also of a worker that has finished"
_CAUSES: Mapping[Feature, Mapping[Feature, str]] = {
    OVERLAP: {
        NO_OPTIMIZER: "it must end before parameters change, and only an optimizer tells when",
        SEVERAL_GRADIENTS: "parameters change between the gradients that it runs beside",
        ASYNCHRONOUS: "asynchronous meetings are held beside the gradient already",
        TRACKING: "tracking exchanges the gradient, which is not known yet",
        **dict.fromkeys((SHARED, MOMENTUM_TRACKING, EXACT_DIFFUSION, RATE_FIRST), _STEP_FIRST),
        PUSH_SUM: "steps must be in x before it is sent",
    },
    OUTER_PLAN: {OTHER_MOMENTUM: "both change what a round does"},
    CONTINUE: {
        RATE_FIRST: "what is exchanged is prepared before it is known who is there",
        ONE_WAY_ROUNDS: "a lost message takes its share of the sum, so it needs meetings of two",
        NO_LINKS: "it needs links of our own, which know who is gone",
    },
    TOP_K: {
        MOMENTUM: "its error feedback plays the part of momentum between averages",
        OVERLAP: "it sends what a worker has moved by since the last average, which must be over",
        REPLAN: "all workers take part in each average, whatever its links take",
        CONTINUE: "each average needs all workers",
    },
    EXACT_DIFFUSION: {
        CONTINUE: "its corrections cancel only while all workers are there",
        REPLAN: "how much it corrects is decided with the plan's rounds",
        JOIN: _CORRECTED,
    },
    MOMENTUM_TRACKING: {
        JOIN: _CORRECTED,
        NO_OPTIMIZER: "it replaces each step, and only an optimizer tells when one comes",
    },
    TRACKING: {
        NO_OPTIMIZER: "it corrects gradients before each step, and only an optimizer tells when",
        LBFGS: "it corrects one gradient per step, but LBFGS computes several",
    },
    ASYNCHRONOUS: {
        MOMENTUM: "a worker's momentum is its own",
        CONTINUE: "all workers must stay",
        REPLAN: "all workers must reach an iteration together to change the plan",
        CLIP: "the bound is for meetings at the same iteration",
        NOT_PAIRS: "meetings of two are held when both have time",
        CODED_WIRE: "messages hold whole values",
        GROUP: "a worker is one process",
        ONE_THREAD: "two threads talk at once",
    },
    MOMENTUM: {
        DIRECTED: "its rules follow meetings of two",
        SHARDED: "its rules need whole parameters on one process",
        PUSH_SUM: "what is exchanged is not what the optimizer steps",
    },
    CLIP: {
        TRACKING: "clip bounds parameters, but tracking sends gradients as well",
        MOMENTUM_TRACKING: "clip bounds parameters, but it sends momentum as well",
        SHARED: "clip bounds parameters, but shared momentum sends moments as well",
        NO_MEETINGS: "clip bounds what two workers do to each other, so it needs meetings",
    },
    WEIGHTS: {
        NOT_SGD: "they multiply gradients, which Adam and the like divide by their size",
        **dict.fromkeys((ASYNCHRONOUS, CONTINUE, REPLAN), _OF_ALL),
    },
    RELAY: {
        NOT_WHOLE: "sums over many workers need whole values",
        MOMENTUM: "momentum would take its averages of earlier models for what a meeting moved",
        OVERLAP: "what is relayed is late already, and would be a step later",
        CONTINUE: "a worker that is lost takes the sums that it would relay with it",
        REPLAN: "sums go on from round to round, so the tree stays",
    },
    REPLAN: {
        STAGES: "a plan that follows the network starts with one stage",
        FIXED_PLAN: "the next stage would be the same plan, so it cannot follow the network",
        ONE_WAY_LINKS: "only exchanges in both directions are timed",
    },
    JOIN: {
        NOT_PAIRS: "two that meet tell each other whether they have finished",
        CONTINUE: "a worker that has finished leaves, and the others go on without it",
        REPLAN: "all workers must be there to plan",
    },
    EPOCHS: {CONTINUE: "a worker that comes back starts in the middle of an epoch"},
    GROWTH: {
        SET_PLAN: "the next stage is planned when workers come and go",
        STAGES: "stages are made when workers come and go",
        FOLLOWED: "its memory does not follow the average",
        OVERLAP: "a round under way has the old plan",
        CLIP: "its bound is the first plan's",
        REPLAN: "both make stages, and one at a time can",
        LOW_RANK: "what it remembers of links is for the first workers",
        SHARED_TRANSPORT: "only one of them would follow the team",
    },
    LOAD_STATE: {
        PUSH_SUM: "it keeps x and ω beside the parameters",
        RELAY: "it keeps sums beside the parameters",
    },
    TASK: {ASYNCHRONOUS: "workers that meet asynchronously have no epochs together"},
    BESIDE: {
        SHARED_TRANSPORT: "they exchange beside the script, so the two would mix their messages",
    },
    MESH: {TRANSPORT: "mesh makes transports of its own"},
}
EXCLUSIONS = tuple(
    Exclusion(first, second, cause)
    for first, others in _CAUSES.items()
    for second, cause in others.items()
)
"""What does not go together. The first that a setup runs into is the error."""


# -- what a script gives ---------------------------------------------------------------------------

_ATTRIBUTES = ("base_optimizer", "optimizer", "_optimizer")  # SAM's; Accelerate's; Lightning's
Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None


def as_list(given: Optimizers) -> list[Any]:
    """Return the optimizers that a script gave: none, one or several."""
    if given is None:
        return []
    return list(given) if isinstance(given, Iterable) else [given]


def _perturbs(optimizer: object) -> bool:
    """Whether it is like SAM: a first step away, a second back and on by an optimizer inside."""
    return hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step")


def wrapped_by(optimizer: Any) -> Any:
    """The optimizer that another one holds and hands steps on to; None where it holds none."""
    found = (getattr(optimizer, name, None) for name in _ATTRIBUTES)
    return next((inside for inside in found if hasattr(inside, "param_groups")), None)


def hookable(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer whose `step()` changes parameters, taken out of its wrappers."""
    # A wrapper may be an Optimizer that was never initialised as one (Accelerate's).
    if hasattr(optimizer, "_optimizer_step_pre_hooks") and not _perturbs(optimizer):
        hooked: torch.optim.Optimizer = optimizer
        return hooked
    inside = wrapped_by(optimizer)
    if inside is not None:
        return hookable(inside)
    raise InputError(
        f"the steps of {type(optimizer).__name__} cannot be followed: give Gossip the "
        "torch.optim.Optimizer inside it, or None and call gossip.step() after each update."
    )


def combine(model: nn.Module, also: Sequence[nn.Module]) -> nn.Module:
    """Return the model and further modules as one module, or the model itself if it is alone."""
    for module in also:
        if not isinstance(module, nn.Module):
            raise InputError(
                f"also= holds a {type(module).__name__}, but it takes modules: for a parameter "
                "alone, nn.ParameterList([parameter])."
            )
    if not also:
        return model
    first, *others = (getattr(module, "_orig_mod", module) for module in (model, *also))
    return nn.ModuleDict({"model": first, "also": nn.ModuleList(others)})


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside `torch.compile` and DistributedDataParallel."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inside := getattr(model, "_orig_mod", None), nn.Module):
            model = inside
        else:
            return model
