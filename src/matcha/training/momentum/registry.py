"""Which momentum an optimizer and a plan can have, and the rule of each kind."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from matcha.errors import InputError
from matcha.plans import PlanLike
from matcha.training.momentum.exact_diffusion import ExactDiffusion, stable_correction
from matcha.training.momentum.momentum_tracking import MomentumTracking
from matcha.training.momentum.outer import Outer
from matcha.training.momentum.quasi_global import (
    QuasiGlobal,
    iterations_between_meetings,
    stable_follow,
)
from matcha.training.momentum.rule import MomentumRule
from matcha.training.momentum.settings import Momentum, parse_momentum
from matcha.training.momentum.shared import Shared
from matcha.training.momentum.tracking import Tracking
from matcha.training.optimizers import SGD, Adam, Optimizer


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
    chosen = chosen or automatic(optimizer)
    needs = chosen.kind in ("quasi-global", "shared")
    if needs and not (isinstance(optimizer, (SGD, Adam)) and optimizer.momentum):
        raise InputError(f"{chosen.kind} momentum needs SGD with momentum, or Adam")
    return chosen


def automatic(optimizer: Optimizer) -> Momentum:
    """What is best, as measured, for an optimizer."""
    if isinstance(optimizer, SGD) and optimizer.momentum:
        return Momentum(kind="quasi-global")
    return Momentum(kind="local")


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
        return Shared(x)
    if spec.kind == "exact-diffusion":
        return ExactDiffusion(spec, x)
    if spec.kind == "momentum-tracking":
        return MomentumTracking(x)
    return Tracking(spec, x) if spec.kind == "tracking" else MomentumRule()
