"""Momentum that knows about meetings: quasi-global, outer step and tracking, for either engine.

Local momentum pulls workers apart between meetings. Each remedy here is a few operations around
the optimizer's step and the round that follows it, on flat tensors: all workers' rows in the
simulator, one worker's buckets in the runtime. docs/momentum.md compares them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from matcha.errors import InputError, unknown_name
from matcha.plans import PlanLike
from matcha.training.optimizers import SGD, Adam, Optimizer
from matcha.wires.wire import BLOCK

Kind: TypeAlias = Literal["local", "quasi-global", "outer", "tracking", "shared"]
MOMENTA = ("local", "quasi-global", "outer", "tracking", "shared", "auto")
_SAMPLE = 2000  # rounds looked at to know how often a worker meets another
_OVERSHOOT = 0.5
"""What quasi-global momentum may add to a meeting's displacement before the next meeting.

Followed whole, a displacement Δ comes back as β/(1 − β) = 9 times Δ, spread over a hundred
iterations. With meetings in between they correct it; with few, workers swing past each other, and
run away once more than Δ comes back from one meeting to the next. A wire's noise is part of Δ and
no meeting corrects: the more of a difference it leaves, the less may come back (measured with
gradients of pure noise, where 3 bits and a meeting in 4.5 iterations hold 0.25, one in 11 too).
"""


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

    def __post_init__(self) -> None:
        if self.kind not in MOMENTA[:-1]:
            raise unknown_name("momentum", str(self.kind), MOMENTA)
        for name in ("memory", "outer_momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name} must be in [0, 1), not {getattr(self, name)}")
        if self.follow is not None and not 0 <= self.follow <= 1:
            raise InputError(f"follow must be between 0 and 1, not {self.follow}")
        if not self.warmup >= 0:
            raise InputError(f"warmup must be 0 or more iterations, not {self.warmup}")

    @property
    def messages(self) -> int:
        """Vectors that a meeting exchanges: some kinds send a second one."""
        return 2 if self.kind in ("tracking", "shared") else 1


def parse_momentum(name: str | Momentum) -> Momentum | None:
    """A momentum by name, perhaps with values: `outer:outer_rate=0.9`; None for `auto`.

    >>> parse_momentum("quasi-global:follow=0.5").follow
    0.5

    Raises:
        InputError: No momentum has this name, or a value makes no sense.
    """
    if isinstance(name, Momentum):
        return name
    kind, _, rest = name.partition(":")
    if kind not in MOMENTA:
        raise unknown_name("momentum", name, MOMENTA)
    try:
        pairs = (part.split("=") for part in rest.split(",") if part)
        values = {k: bool(int(v)) if k == "nesterov" else float(v) for k, v in pairs}
        return None if kind == "auto" else Momentum(kind=kind, **values)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"momentum {name!r} is not a kind with values as name=number") from None


def iterations_between_meetings(plan: PlanLike) -> float:
    """How many iterations pass from a worker's meeting to its next, on average."""
    rounds = list(islice(plan.rounds(0, _SAMPLE), _SAMPLE))
    met = sum(2 * len(matching) for round in rounds for matching in round.matchings)
    return len(rounds) * plan.num_workers / met if met else float("inf")


def resolve_momentum(name: str | Momentum, optimizer: Optimizer, plan: PlanLike) -> Momentum:
    """Fill in what the named momentum leaves open and optimizer, plan and its wire decide.

    Raises:
        InputError: It needs an optimizer with momentum, and this one has none.
    """
    chosen = momentum_for(name, optimizer)
    if chosen.kind != "quasi-global":
        return chosen
    chosen = replace(chosen, pause=iterations_between_meetings(plan))
    if chosen.follow is None:
        follow = stable_follow(optimizer, chosen.memory, chosen.pause, plan.wire.residual)
        chosen = replace(chosen, follow=follow)
    return chosen


def momentum_for(name: str | Momentum, optimizer: Optimizer) -> Momentum:
    """The named momentum, if the optimizer can have it.

    Raises:
        InputError: It needs an optimizer with momentum, and this one has none.
    """
    chosen = parse_momentum(name) or automatic(optimizer)
    needs = chosen.kind in ("quasi-global", "shared")
    if needs and not (isinstance(optimizer, (SGD, Adam)) and optimizer.momentum):
        raise InputError(f"{chosen.kind} momentum needs SGD with momentum, or Adam")
    return chosen


def automatic(optimizer: Optimizer) -> Momentum:
    """What is best, as measured, for an optimizer."""
    if isinstance(optimizer, SGD) and optimizer.momentum:
        return Momentum(kind="quasi-global")
    return Momentum(kind="local")


def stable_follow(optimizer: Optimizer, memory: float, pause: float, leaves: float = 0.0) -> float:
    """The largest share of a displacement that meetings this far apart can hold.

    Args:
        optimizer: whose momentum follows.
        memory: μ.
        pause: iterations between a worker's meetings.
        leaves: the share of a squared difference that the wire leaves.

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


_SWING = 0.05
"""The share of a block's own length that a meeting may move it by and be followed whole: where two
workers differ by all they have, a tenth of that is followed, which rare meetings hold too."""

# -- the rules, on tensors ------------------------------------------------------------------------


class MomentumRule:
    """What happens around a step and its round; this one: nothing (local momentum)."""

    def state(self) -> Mapping[str, Tensor]:
        """What the next iteration depends on."""
        return {}

    def reset(self, x: Tensor) -> None:
        """Start again at these values."""

    def adjust_gradient(self, gradients: Tensor) -> None:
        """Change the gradients before the optimizer sees them."""

    def before_step(self, x: Tensor, memory: Mapping[str, Tensor]) -> None:
        """The optimizer is about to step, or the round to begin."""

    def after_step(self, x: Tensor, rate: Tensor | float) -> None:
        """Between the step and the round."""

    def after_round(
        self, x: Tensor, memory: Mapping[str, Tensor], rate: Tensor | float, met: Tensor | None
    ) -> None:
        """After both. `met`: which rows took part in the round; None: all."""

    def after_silent_round(
        self, x: Tensor, memory: Mapping[str, Tensor], rate: Tensor | float
    ) -> None:
        """In place of `after_step` and `after_round`, where no partner was to be met."""


class QuasiGlobal(MomentumRule):
    """The buffer follows the worker's displacement, mixing included (Lin et al., 2021).

    SGD: m̂ ← μm̂ + (1 − μ)(local + ν·mixing)/η, and the step is along βm̂ + g. Adam's first moment
    keeps its own rule and follows the mixing alone, in the gradient's units.

    With μ the buffer takes 1/((1 − μ)(1 − β)) = 100 iterations to fill, with μ = 0 it is local
    momentum and takes 10: μ rises from 0, and ν stays below what a shorter memory can hold.

    What mixing moves a block of 256 values by counts up to a twentieth of the block's own length,
    and what steady gradients of this length would move it by between two meetings. Without that
    bound a direction that no gradient holds (the length of weights before a normalisation) could
    swing ever further, driven by its own meetings. The worker's own gradients alone must not bound
    it: where data are heterogeneous, other workers learn what its own data do not show.

    Args:
        spec: memory μ, followed share ν, iterations between meetings.
        optimizer: whose memory is followed.
        x: the parameters.
        mixes_first: the round comes before the step (the footnote's rule).
    """

    def __init__(
        self, spec: Momentum, optimizer: SGD | Adam, x: Tensor, *, mixes_first: bool = False
    ) -> None:
        assert spec.follow is not None
        self.spec, self.optimizer = spec, optimizer
        self.local, self.mixing = torch.zeros_like(x), torch.zeros_like(x)
        self.hat = torch.zeros_like(x) if isinstance(optimizer, SGD) else None
        self._lengths = _block_lengths(self.local)
        self.age = torch.zeros((), dtype=x.dtype, device=x.device)
        pair = self.local, self.mixing
        self._first, self._second = reversed(pair) if mixes_first else pair

    def state(self) -> Mapping[str, Tensor]:
        """How many iterations it has followed."""
        return {} if self.hat is None else {"age": self.age}

    def reset(self, x: Tensor) -> None:
        """Start again."""
        self.age.zero_()

    def adjust_gradient(self, gradients: Tensor) -> None:
        """Note how long the gradient is, block by block; it is left as it is."""
        self._lengths.copy_(_block_lengths(gradients))

    def before_step(self, x: Tensor, memory: Mapping[str, Tensor]) -> None:
        """Keep the buffer and where the worker stands."""
        self._first.copy_(x)
        if self.hat is not None:
            self.hat.copy_(memory["momentum"])

    def after_step(self, x: Tensor, rate: Tensor | float) -> None:
        """The first of step and round is over."""
        self._first.sub_(x)
        self._second.copy_(x)

    def after_round(
        self, x: Tensor, memory: Mapping[str, Tensor], rate: Tensor | float, met: Tensor | None
    ) -> None:
        """Fold the displacement into the optimizer's memory."""
        assert self.spec.follow is not None
        self._second.sub_(x)
        pause = max(1.0, self.spec.pause)
        if self.hat is not None:
            keep = self._grow_old()
            followed = self.mixing.mul_(self._follow(keep) * self.spec.follow)
            limit = self._lengths * (rate * (pause / (1 - self.optimizer.momentum)))
            _shorten_blocks(followed, limit.add_(_block_lengths(x), alpha=_SWING))
            torch.mul(self.hat, keep, out=memory["momentum"])
            memory["momentum"].add_(followed.add_(self.local).mul_((1 - keep) / rate))
            return
        assert isinstance(self.optimizer, Adam)
        followed = self.mixing.mul_(self.spec.follow)
        limit = _block_lengths(self.local).mul_(pause)
        _shorten_blocks(followed, limit.add_(_block_lengths(x), alpha=_SWING))
        scale = self.optimizer.denominator(memory).mul_((1 - self.optimizer.beta1) / rate)
        memory["first"].addcmul_(followed, scale)

    def after_silent_round(
        self, x: Tensor, memory: Mapping[str, Tensor], rate: Tensor | float
    ) -> None:
        """Fold the step alone into SGD's memory; Adam's follows meetings only.

        What `after_round` does where the round moved nothing, without its bounds on what it moved.
        """
        if self.hat is not None:
            keep = self._grow_old()
            torch.mul(self.hat, keep, out=memory["momentum"])
            memory["momentum"].add_(self.local.sub_(x).mul_((1 - keep) / rate))

    def _grow_old(self) -> Tensor:
        """Count an iteration; what the buffer keeps of itself in it."""
        self.age.add_(1.0)
        return (self.age / (self.age + self.spec.warmup)).clamp_(max=self.spec.memory)

    def _follow(self, keep: Tensor) -> Tensor:
        """The share of what μ can hold that a shorter memory can: less, as it comes back sooner."""
        beta, pause = self.optimizer.momentum, max(1.0, self.spec.pause)
        whole = 1 - (self.spec.memory + (1 - self.spec.memory) * beta) ** pause
        soon = 1 - (keep + (1 - keep) * beta).pow(pause)
        share: Tensor = (whole / soon).clamp_(max=1.0)
        return share


def _blocks(x: Tensor) -> Tensor:
    """Values in blocks of 256, the last filled up with zeros; a view where none needs filling."""
    flat = x.reshape(-1)
    missing = -flat.numel() % BLOCK
    return (functional.pad(flat, (0, missing)) if missing else flat).view(-1, BLOCK)


def _block_lengths(x: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(_blocks(x), dim=-1)
    return lengths


def _shorten_blocks(x: Tensor, limits: Tensor) -> None:
    """Scale down blocks longer than their limits; blocks that are not finite become 0."""
    lengths = _block_lengths(x)
    share = (limits / lengths.clamp(min=torch.finfo(x.dtype).tiny)).clamp_(max=1.0)
    shorter = torch.where(torch.isfinite(lengths), share, 0.0).unsqueeze(-1) * _blocks(x)
    x.copy_(shorter.reshape(-1)[: x.numel()].view(x.shape))


class Outer(MomentumRule):
    """At a meeting, a step of its own from an anchor towards the mean.

    v ← βv + α(x̄ − φ), φ ← φ + v, x ← φ, for those who met; x̄ is what the round made of x. With
    `nesterov`, φ ← φ + α(x̄ − φ) + βv with the new v. After an exact average that is DiLoCo's outer
    step; after a meeting of two, NoLoCo's (with its γ equal to α).
    """

    def __init__(self, spec: Momentum, x: Tensor) -> None:
        self.spec = spec
        self.anchor, self.velocity = x.clone(), torch.zeros_like(x)

    def state(self) -> Mapping[str, Tensor]:
        """What later meetings depend on."""
        return {"anchor": self.anchor, "velocity": self.velocity}

    def reset(self, x: Tensor) -> None:
        """Start again at these values."""
        self.anchor.copy_(x)
        self.velocity.zero_()

    def after_round(
        self, x: Tensor, memory: Mapping[str, Tensor], rate: Tensor | float, met: Tensor | None
    ) -> None:
        """Take the outer step."""
        alpha, beta = self.spec.outer_rate, self.spec.outer_momentum
        velocity = self.velocity * beta
        velocity.add_(x, alpha=alpha)
        velocity.sub_(self.anchor, alpha=alpha)
        moved = self.anchor + velocity
        if self.spec.nesterov:  # α(x̄ − φ) + βv, where v holds α(x̄ − φ) once already
            moved.sub_(self.velocity, alpha=beta).add_(velocity, alpha=beta)
        anchor = moved
        if met is not None:
            velocity = torch.where(met, velocity, self.velocity)
            anchor = torch.where(met, moved, self.anchor)
            moved = torch.where(met, moved, x)
        self.velocity.copy_(velocity)
        self.anchor.copy_(anchor)
        x.copy_(moved)


class Tracking(MomentumRule):
    """Gradient tracking: steps follow the average gradient of all workers, as far as it is known.

    A worker steps along g + (y − a): its own gradient, put right by what it knows of the others'.
    a is a running mean of its own gradients, y follows the average of the workers' means by
    y ← W(y + a − a₋), and is exchanged as x is, so a meeting takes twice the bytes.

    As published, a is the last gradient (`memory=0`): what a meeting then learns holds the noise of
    one batch, and a worker that meets rarely walks along that noise until its next meeting.

    Args:
        spec: what the mean keeps of itself an iteration.
        x: the parameters.
    """

    def __init__(self, spec: Momentum, x: Tensor) -> None:
        self.spec = spec
        self.tracked, self.mean = torch.zeros_like(x), torch.zeros_like(x)
        self.age = torch.zeros((), dtype=x.dtype, device=x.device)

    def state(self) -> Mapping[str, Tensor]:
        """What later meetings depend on."""
        return {"tracked": self.tracked, "mean": self.mean, "age": self.age}

    def reset(self, x: Tensor) -> None:
        """Start again at these values."""
        for tensor in self.state().values():
            tensor.zero_()

    def adjust_gradient(self, gradients: Tensor) -> None:
        """Put the gradients right by what is tracked of their average."""
        self.age.add_(1.0)
        newest = self.age.reciprocal().clamp_(min=1 - self.spec.memory)
        self.tracked.sub_(self.mean)
        self.mean.lerp_(gradients, newest)
        self.tracked.add_(self.mean)
        gradients.add_(self.tracked).sub_(self.mean)


class Shared(MomentumRule):
    """First moments are exchanged with the parameters, and no coordinate moves beyond the rate.

    Local Adam divides each worker's first moment by a second moment that holds this worker's own
    noise, so the average of the workers moves too slowly where gradients are noisy or rare. With
    first moments averaged, a worker whose own gradients say nothing of a coordinate moves along
    what others saw. Its second moment is near zero there, and the quotient could be anything:
    without a bound training diverges. The bound is η, the step of a coordinate whose gradients all
    agree.

    Args:
        x: the parameters.
    """

    def __init__(self, x: Tensor) -> None:
        self._before = torch.zeros_like(x)

    def before_step(self, x: Tensor, memory: Mapping[str, Tensor]) -> None:
        """Keep where the worker stands."""
        self._before.copy_(x)

    def after_step(self, x: Tensor, rate: Tensor | float) -> None:
        """Bound the step."""
        limit = torch.as_tensor(rate, dtype=x.dtype, device=x.device).abs()
        step = (x - self._before).clamp_(-limit, limit)
        torch.add(self._before, step, out=x)


def first_moment(memory: Mapping[str, Tensor]) -> Tensor:
    """What `shared` exchanges beside the parameters: Adam's first moment, SGD's momentum."""
    return memory["first"] if "first" in memory else memory["momentum"]


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
    return Tracking(spec, x) if spec.kind == "tracking" else MomentumRule()
