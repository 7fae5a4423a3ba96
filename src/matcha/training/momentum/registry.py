"""Which momentum an optimizer and a plan can have, and the rule of each kind."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from torch import Tensor

from matcha.errors import InputError
from matcha.plans import PlanLike
from matcha.training.momentum.exact_diffusion import ExactDiffusion, stable_correction
from matcha.training.momentum.outer import Outer
from matcha.training.momentum.quasi_global import (
    QuasiGlobal,
    iterations_between_meetings,
    stable_follow,
)
from matcha.training.momentum.rule import MomentumRule
from matcha.training.momentum.settings import Momentum, parse_momentum
from matcha.training.momentum.shared import Shared
from matcha.training.momentum.tracking import MomentumTracking, Tracking
from matcha.training.optimizers import SGD, Adam, Muon, Optimizer
from matcha.wires import TopK

_RARE = 8.0
"""Iterations between a worker's rounds from which outer steps pay with Adam: √(4 · 16)."""
_SAMPLE = 2000


def resolve_momentum(name: str | Momentum, optimizer: Optimizer, plan: PlanLike) -> Momentum:
    """Fill in what the named momentum leaves open and optimizer, plan and its wire decide.

    Raises:
        InputError: It needs an optimizer with momentum, and this one has none.
    """
    chosen = momentum_for(name, optimizer, plan)
    if chosen.kind == "exact-diffusion" and chosen.correction is None:
        return replace(chosen, correction=stable_correction(plan))
    if chosen.kind != "quasi-global":
        return chosen
    chosen = replace(chosen, pause=iterations_between_meetings(plan))
    if chosen.follow is None:
        follow = stable_follow(optimizer, chosen.memory, chosen.pause, plan.wire.residual)
        chosen = replace(chosen, follow=follow)
    return chosen


def with_outer(chosen: Momentum, plan: PlanLike) -> Momentum:
    """The momentum with the plan's outer step, where it has one; your own `outer` replaces it.

    Raises:
        InputError: The momentum follows meetings itself.
    """
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


def momentum_for(
    name: str | Momentum, optimizer: Optimizer, plan: PlanLike | None = None
) -> Momentum:
    """The named momentum, or the plan's outer steps, if the optimizer and the plan can have it.

    Raises:
        InputError: It needs an optimizer with momentum, and this one has none; or it does not go
            with the plan's outer steps.
    """
    chosen = parse_momentum(name)
    if plan is not None and plan.outer is not None:
        return with_outer(chosen or Momentum(), plan)
    chosen = chosen or automatic(optimizer, plan)
    needs = chosen.kind in ("quasi-global", "shared")
    able_too = isinstance(optimizer, (SGD, Adam)) and optimizer.momentum
    if needs and (not able_too or (isinstance(optimizer, Muon) and chosen.kind != "shared")):
        able = "Adam" if chosen.kind == "quasi-global" else "Adam, or torch.optim.Muon"
        raise InputError(f"{chosen.kind} momentum needs SGD with momentum, or {able}")
    return chosen


def automatic(optimizer: Optimizer, plan: PlanLike | None = None) -> Momentum:
    """What is best, as measured, for an optimizer, and with Adam for a plan's rounds."""
    if plan is not None and isinstance(plan.wire, TopK):  # its error feedback is a momentum
        return Momentum(kind="local")
    if isinstance(optimizer, SGD) and optimizer.momentum:
        return Momentum(kind="quasi-global")
    if isinstance(optimizer, Adam) and plan is not None:
        return _automatic_with_adam(plan)
    return Momentum(kind="local")


def _automatic_with_adam(plan: PlanLike) -> Momentum:
    """Outer steps where rounds are rare.

    On a language model a worker's round every sixteenth iteration gained by them, and one every
    fourth lost (benchmarks/results/language.jsonl). First moments are not shared: at equal bytes
    that gained nothing there.
    """
    rounds = list(islice(plan.rounds(0, _SAMPLE), _SAMPLE))
    taken = sum(len({worker for link in round.links for worker in link}) for round in rounds)
    if not taken or _SAMPLE * plan.num_workers / taken < _RARE:
        return Momentum(kind="local")
    return Momentum(kind="outer", nesterov=any(round.is_exact for round in rounds))


def make_rule(
    spec: Momentum, optimizer: Optimizer, x: Tensor, *, mixes_first: bool = False
) -> MomentumRule:
    """The rule of a settled momentum for these parameters."""
    if spec.kind == "quasi-global":
        assert isinstance(optimizer, (SGD, Adam))
        return QuasiGlobal(spec, optimizer, x, mixes_first=mixes_first)
    if spec.kind == "outer":
        return Outer(spec, x)
    if spec.kind == "shared" and isinstance(optimizer, Adam):
        muon = optimizer.matrices if isinstance(optimizer, Muon) else ()
        return Shared(x, [slice(place, place + a * b) for place, a, b in muon])
    if spec.kind == "exact-diffusion":
        return ExactDiffusion(spec, x)
    if spec.kind == "momentum-tracking":
        return MomentumTracking(x)
    return Tracking(spec, x) if spec.kind == "tracking" else MomentumRule()
