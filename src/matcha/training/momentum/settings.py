"""What a momentum is called, which values it has, and what optimizer and plan make of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal, TypeAlias, get_args

import numpy as np

from matcha.errors import InputError, unknown_name
from matcha.plans import PlanLike
from matcha.training.optimizers import SGD, Adam, Muon, Optimizer
from matcha.wires import TopK

Kind: TypeAlias = Literal[
    "local",
    "quasi-global",
    "outer",
    "tracking",
    "momentum-tracking",
    "exact-diffusion",
    "shared",
]
MOMENTA = (*get_args(Kind), "auto")

_SAMPLE = 2000
"""Rounds of a plan that are looked at to see how often workers meet and what rounds hold."""
_RARE = 8.0
"""Iterations between a worker's rounds from which outer steps pay with Adam: √(4 · 16)."""
_OVERSHOOT = 0.5
"""What quasi-global momentum may add to a meeting's displacement before the next meeting.

Followed whole, a displacement Δ comes back as β/(1 − β) = 9 times Δ, spread over a hundred
iterations. With meetings in between they correct it; with few, workers swing past each other, and
run away once more than Δ comes back from one meeting to the next. A wire's noise is part of Δ and
no meeting corrects: the more of a difference it leaves, the less may come back (measured with
gradients of pure noise, where 3 bits and a meeting in 4.5 iterations hold 0.25, one in 11 too).
"""
_TRIED = tuple(2.0**-k for k in range(12))
_GONE = 1e-9
"""What is left of a difference that has died out; rounding errors live on below."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Momentum:
    """How momentum and meetings go together."""

    kind: Kind = "local"
    memory: float = 0.9
    """Quasi-global: what the buffer keeps of itself an iteration (μ). Tracking: what the mean of a
    worker's own gradients does; 0: as published, which rare meetings do not survive."""
    follow: float | None = None
    """Quasi-global: the share of a meeting's displacement that the buffer follows; None: as much
    as the plan's meetings can hold."""
    pause: float = 1.0
    """Quasi-global: iterations between a worker's meetings."""
    warmup: float = 30.0
    """Quasi-global: at iteration k the buffer keeps at most k/(k + warmup) of itself, and begins as
    local momentum does; 0: μ from the start, as published, which short trainings regret."""
    outer_rate: float = 0.7
    outer_momentum: float = 0.5
    nesterov: bool = False
    """Outer: step along Δ + βv and not along v, as DiLoCo does."""
    rate_first: bool = False
    """Outer: exchange φ + α(x − φ), as GASLoC does, and not x."""
    correction: float | None = None
    """Exact diffusion: the share of what rounds moved a worker by that each iteration anticipates;
    None: what the plan's rounds hold. 1 is D² as published."""

    def __post_init__(self) -> None:
        if self.kind not in MOMENTA[:-1]:
            raise unknown_name("momentum", str(self.kind), MOMENTA)
        for name in ("memory", "outer_momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name} must be in [0, 1), not {getattr(self, name)}")
        for name in ("follow", "correction"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise InputError(f"{name} must be between 0 and 1, not {value}")
        if not self.warmup >= 0:
            raise InputError(f"warmup must be 0 or more iterations, not {self.warmup}")

    @property
    def messages(self) -> int:
        """Vectors that a meeting exchanges: some kinds send a second one."""
        return 2 if self.kind in ("tracking", "momentum-tracking", "shared") else 1

    @property
    def steps_first(self) -> bool:
        """Whether it changes what a step did before the round, so that overlap excludes it."""
        kinds = ("momentum-tracking", "exact-diffusion", "shared")
        return self.kind in kinds or (self.kind == "outer" and self.rate_first)


def parse_momentum(name: str | Momentum) -> Momentum | None:
    """A momentum by name, perhaps with values: `outer:outer_rate=0.9`; None for `auto`.

    >>> parse_momentum("quasi-global:follow=0.5").follow
    0.5
    """
    if isinstance(name, Momentum):
        return name
    kind, _, rest = name.partition(":")
    if kind not in MOMENTA:
        raise unknown_name("momentum", name, MOMENTA)
    try:
        pairs = (part.split("=") for part in rest.split(",") if part)
        flags = ("nesterov", "rate_first")
        values = {k: bool(int(v)) if k in flags else float(v) for k, v in pairs}
        return None if kind == "auto" else Momentum(kind=kind, **values)  # type: ignore[arg-type]
    except InputError:
        raise
    except (TypeError, ValueError):
        raise InputError(f"momentum {name!r} is not a kind with values as name=number") from None


def resolve_momentum(name: str | Momentum, optimizer: Optimizer, plan: PlanLike) -> Momentum:
    """Fill in what the named momentum leaves open and optimizer, plan and its wire decide."""
    chosen = momentum_for(name, optimizer, plan)
    if chosen.kind == "exact-diffusion" and chosen.correction is None:
        return replace(chosen, correction=stable_correction(plan))
    if chosen.kind != "quasi-global":
        return chosen
    pause, follow = iterations_between_meetings(plan), chosen.follow
    if follow is None:
        follow = stable_follow(optimizer, chosen.memory, pause, plan.wire.residual)
    return replace(chosen, pause=pause, follow=follow)


def momentum_for(
    name: str | Momentum, optimizer: Optimizer, plan: PlanLike | None = None
) -> Momentum:
    """The named momentum, or the plan's outer steps, if the optimizer and the plan can have it."""
    chosen = parse_momentum(name)
    if plan is not None and plan.outer is not None:
        return with_outer(chosen or Momentum(), plan)
    chosen = chosen or automatic(optimizer, plan)
    if chosen.kind in ("quasi-global", "shared"):
        is_muon = isinstance(optimizer, Muon) and chosen.kind != "shared"
        if is_muon or not optimizer.momentum:
            able = "Adam" if chosen.kind == "quasi-global" else "Adam, or torch.optim.Muon"
            raise InputError(f"{chosen.kind} momentum needs SGD with momentum, or {able}")
    return chosen


def with_outer(chosen: Momentum, plan: PlanLike) -> Momentum:
    """The momentum with the plan's outer step, where it has one; your own `outer` replaces it."""
    step = plan.outer
    if step is None or chosen.kind == "outer":
        return chosen
    if chosen.kind != "local":
        raise InputError(
            f"a {plan.strategy} plan takes an outer step after each round, but {chosen.kind} "
            "momentum changes what a round does as well: leave momentum at local, or use another "
            "strategy."
        )
    return Momentum(
        kind="outer",
        outer_rate=step.rate,
        outer_momentum=step.momentum,
        nesterov=step.nesterov,
        rate_first=step.rate_first,
    )


def automatic(optimizer: Optimizer, plan: PlanLike | None = None) -> Momentum:
    """What is best, as measured, for an optimizer, and with Adam for a plan's rounds.

    Outer steps are where rounds are rare: on a language model a worker's round every sixteenth
    iteration gained by them, and one every fourth lost (benchmarks/results/language.jsonl). First
    moments are not shared: at equal bytes that gained nothing there.
    """
    if plan is not None and isinstance(plan.wire, TopK):  # its error feedback is a momentum
        return Momentum()
    if isinstance(optimizer, SGD) and optimizer.momentum:
        return Momentum(kind="quasi-global")
    if isinstance(optimizer, Adam) and plan is not None:
        rounds = list(islice(plan.rounds(0, _SAMPLE), _SAMPLE))
        taken = sum(len({worker for link in round.links for worker in link}) for round in rounds)
        if taken and _SAMPLE * plan.num_workers / taken >= _RARE:
            return Momentum(kind="outer", nesterov=any(round.is_exact for round in rounds))
    return Momentum()


def iterations_between_meetings(plan: PlanLike) -> float:
    """How many iterations pass from a worker's meeting to its next, on average.

    Where workers join or leave for good, before any did: those that train hold to what they chose.
    """
    if len({level.members for level in plan.levels}) > 1:
        plan = plan.level_at(0)
    rounds = list(islice(plan.rounds(0, _SAMPLE), _SAMPLE))
    met = sum(2 * len(matching) for round in rounds for matching in round.matchings)
    return len(rounds) * plan.num_workers / met if met else float("inf")


def stable_follow(optimizer: Optimizer, memory: float, pause: float, leaves: float = 0.0) -> float:
    """The largest share of a displacement that meetings `pause` iterations apart can hold.

    `memory` is μ, `leaves` the share of a squared difference that the wire leaves.

    >>> stable_follow(SGD(momentum=0.9), 0.9, pause=4)
    1.0
    >>> round(stable_follow(SGD(momentum=0.9), 0.9, pause=100), 3)
    0.088
    """
    beta = optimizer.momentum
    allowed = _OVERSHOOT * (1 - leaves)
    if not isinstance(optimizer, SGD):
        return allowed
    kept = memory + (1 - memory) * beta  # of the buffer, an iteration without a meeting
    comes_back = beta / (1 - beta) * (1 - math.pow(kept, pause))
    return min(1.0, allowed / comes_back)


def stable_correction(plan: PlanLike) -> float:
    """The share κ under which differences between workers die out soonest in a plan's rounds.

    The largest of 1, ½, ¼, … that is about as good as any: found by following a few differences
    through the rounds themselves.

    >>> import matcha
    >>> stable_correction(matcha.plan(matcha.families.complete(8), 1.0, "allreduce"))
    1.0
    >>> stable_correction(matcha.plan(matcha.families.complete(8), 0.1, "hypercube"))
    0.25
    """
    m, columns = plan.num_workers, 2 * len(_TRIED)
    shares = np.repeat(_TRIED, 2)
    x, y = np.random.default_rng(0).normal(size=(2, m, columns))
    x, y = x - x.mean(0), y - y.mean(0)
    size, rounds = np.ones(columns), np.ones(columns)
    for round in islice(plan.rounds(0, _SAMPLE), _SAMPLE):
        lives = (size > _GONE) & (size < 1 / _GONE)
        before = x - shares * y
        mixed = round.mix(before)
        x, y = np.where(lives, mixed, x), np.where(lives, y + before - mixed, y)
        size = np.sqrt((x * x + y * y).sum(0) / m) + 1e-99
        rounds += lives
    speed = (np.log(size) / rounds).reshape(-1, 2).max(1)
    return next(k for k, s in zip(_TRIED, speed, strict=True) if s <= 0.8 * speed.min())
