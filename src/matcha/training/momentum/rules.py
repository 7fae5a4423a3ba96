"""The momentum rules: what happens around a step and its round, a class per kind of `Momentum`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module

import torch
from torch import Tensor
from torch.nn import functional

from matcha.training.momentum.settings import Momentum
from matcha.training.optimizers import SGD, Adam, Muon, Optimizer
from matcha.wires import kernels
from matcha.wires.wire import BLOCK

_SWING = 0.05
"""The share of a block's own length that a meeting may move it by and be followed whole: where two
workers differ by all they have, a tenth of that is followed, which rare meetings hold too."""


class MomentumRule:
    """What happens around a step and its round; this one: nothing (local momentum)."""

    acts_without_round = False
    """Whether `after_round` does anything where no worker met another."""

    def state(self) -> Mapping[str, Tensor]:
        """What the next iteration depends on."""
        return {}

    def reset(self, x: Tensor) -> None:
        """Start again at these values."""
        for tensor in self.state().values():
            tensor.zero_()

    def adjust_gradient(self, gradients: Tensor) -> None:
        """Change the gradients before the optimizer sees them."""

    def before_step(self, x: Tensor, memory: Mapping[str, Tensor]) -> None:
        """The optimizer is about to step, or the round to begin."""

    def after_step(self, x: Tensor, rate: Tensor | float) -> None:
        """Between the step and the round."""

    def after_skipped_step(self, x: Tensor, rate: Tensor | float) -> None:
        """In place of `after_step`, where the optimizer left its step out."""

    def before_round(self, x: Tensor, met: Tensor | None) -> None:
        """Right before the round, after the step. `met`: rows that take part in it; None: all."""

    def after_round(
        self, x: Tensor, memory: Mapping[str, Tensor], rate: Tensor | float, met: Tensor | None
    ) -> None:
        """After both. `met`: which rows took part in the round; None: all."""

    def after_silent_round(
        self, x: Tensor, memory: Mapping[str, Tensor], rate: Tensor | float
    ) -> None:
        """In place of `after_step` and `after_round`, where no partner was to be met."""


class Tracking(MomentumRule):
    """Gradient tracking: steps follow the average gradient of all workers, as far as it is known.

    A worker steps along g + (y − a): its own gradient, put right by what it knows of the others'.
    a is a running mean of its own gradients, y follows the average of the workers' means by
    y ← W(y + a − a₋), and is exchanged as x is, so a meeting takes twice the bytes.

    As published, a is the last gradient (`memory=0`): what a meeting then learns holds the noise of
    one batch, and a worker that meets rarely walks along that noise until its next meeting.
    """

    def __init__(self, spec: Momentum, x: Tensor) -> None:
        self.spec = spec
        self.tracked, self.mean = torch.zeros_like(x), torch.zeros_like(x)
        self.age = torch.zeros((), dtype=x.dtype, device=x.device)

    def state(self) -> Mapping[str, Tensor]:
        return {"tracked": self.tracked, "mean": self.mean, "age": self.age}

    def adjust_gradient(self, gradients: Tensor) -> None:
        self.age.add_(1.0)
        newest = self.age.reciprocal().clamp_(min=1 - self.spec.memory)
        self.tracked.sub_(self.mean)
        self.mean.lerp_(gradients, newest)
        self.tracked.add_(self.mean)
        gradients.add_(self.tracked).sub_(self.mean)


class MomentumTracking(MomentumRule):
    """Steps follow the average momentum of all workers, as far as it is known.

    u is the direction in which the optimizer stepped. The worker steps along u + (y − u₋) instead,
    and y ← W(y + u − u₋) is exchanged as x is: Momentum Tracking (Takezawa et al., 2022) where u is
    the buffer of SGD with momentum.
    """

    def __init__(self, x: Tensor) -> None:
        self.tracked, self.last = torch.zeros_like(x), torch.zeros_like(x)
        self._before = torch.zeros_like(x)

    def state(self) -> Mapping[str, Tensor]:
        return {"tracked": self.tracked, "last": self.last}

    def before_step(self, x: Tensor, memory: Mapping[str, Tensor]) -> None:
        self._before.copy_(x)

    def after_step(self, x: Tensor, rate: Tensor | float) -> None:
        rate = torch.as_tensor(rate, dtype=x.dtype, device=x.device)
        newest = (self._before - x) / rate.clamp(min=torch.finfo(x.dtype).tiny)
        newest = torch.where(rate > 0, newest, self.last)  # a step at a rate of 0 tells nothing
        self.after_skipped_step(x, rate)
        self.tracked.add_(newest).sub_(self.last)
        self.last.copy_(newest)

    def after_skipped_step(self, x: Tensor, rate: Tensor | float) -> None:
        # What was tracked before corrects it all the same: the workers' corrections cancel.
        x.sub_((self.tracked - self.last).mul_(rate))


class ExactDiffusion(MomentumRule):
    """Exact diffusion, or D²: no vector beside the parameters is sent.

    y adds up what rounds moved the worker by, y ← y + x − Wx, and each iteration steps along
    −ηu − κy. Where data differ and rounds alone would leave a steady difference, y grows until
    every worker drifts as the average does. The y of all workers cancel, as moves at a meeting do,
    so the average model takes the average step.

    With κ = 1 and the same W in every iteration that is D² (Tang et al., 2018) and exact
    diffusion (Yuan et al., 2018): x ← W(2x − x₋ − η(u − u₋)). Where workers meet rarely, or other
    ones each time, a y is in force for many iterations before a meeting renews it, and κ must be
    below 2 over their number: `stable_correction`.
    """

    def __init__(self, spec: Momentum, x: Tensor) -> None:
        assert spec.correction is not None
        self.share = spec.correction
        self.moved, self._before = torch.zeros_like(x), torch.zeros_like(x)

    def state(self) -> Mapping[str, Tensor]:
        return {"moved": self.moved}

    def after_step(self, x: Tensor, rate: Tensor | float) -> None:
        x.sub_(self.moved, alpha=self.share)
        self._before.copy_(x)

    def after_skipped_step(self, x: Tensor, rate: Tensor | float) -> None:
        self.after_step(x, rate)  # what rounds do has nothing to do with the step

    def after_round(
        self, x: Tensor, memory: Mapping[str, Tensor], rate: Tensor | float, met: Tensor | None
    ) -> None:
        self.moved.add_(self._before).sub_(x)


class Shared(MomentumRule):
    """First moments are exchanged with the parameters, and no coordinate moves beyond the rate.

    Local Adam divides each worker's first moment by a second moment that holds this worker's own
    noise, so the average of the workers moves too slowly where gradients are noisy or rare. With
    first moments averaged, a worker whose own gradients say nothing of a coordinate moves along
    what others saw. Its second moment is near zero there, and the quotient could be anything:
    without a bound training diverges. The bound is η, the step of a coordinate whose gradients all
    agree. Muon's steps, at the `unbounded` places of a row, are of one size whatever the momentum.
    """

    def __init__(self, x: Tensor, unbounded: Sequence[slice] = ()) -> None:
        self._before = torch.zeros_like(x)
        self._unbounded = unbounded

    def before_step(self, x: Tensor, memory: Mapping[str, Tensor]) -> None:
        self._before.copy_(x)

    def after_step(self, x: Tensor, rate: Tensor | float) -> None:
        limit = torch.as_tensor(rate, dtype=x.dtype, device=x.device).abs()
        step = (x - self._before).clamp_(-limit, limit)
        kept = [x[..., place].clone() for place in self._unbounded]
        torch.add(self._before, step, out=x)
        for place, values in zip(self._unbounded, kept, strict=True):
            x[..., place] = values


def first_moment(memory: Mapping[str, Tensor]) -> Tensor:
    """What `shared` exchanges beside the parameters: Adam's first moment, SGD's momentum."""
    return memory["first"] if "first" in memory else memory["momentum"]


class Outer(MomentumRule):
    """At a meeting, a step of its own from an anchor towards the mean.

    v ← βv + α(x̄ − φ), φ ← φ + v, x ← φ, for those who met; x̄ is what the round made of x. With
    `nesterov`, φ ← φ + α(x̄ − φ) + βv with the new v. After an exact average that is DiLoCo's outer
    step; after a meeting of two, NoLoCo's (with its γ equal to α, as in its authors' code).

    With `rate_first` workers exchange y = φ + α(x − φ) and step from ȳ: φ ← ȳ + β(ȳ − ȳ₋), where ȳ₋
    is what the round before made (GASLoC). ȳ − ȳ₋ is v, so it is the same code with α = 1.
    """

    def __init__(self, spec: Momentum, x: Tensor) -> None:
        self.spec = spec
        self.anchor, self.velocity = x.clone(), torch.zeros_like(x)

    def state(self) -> Mapping[str, Tensor]:
        return {"anchor": self.anchor, "velocity": self.velocity}

    def reset(self, x: Tensor) -> None:
        self.anchor.copy_(x)
        self.velocity.zero_()

    def before_round(self, x: Tensor, met: Tensor | None) -> None:
        if self.spec.rate_first:
            moved = torch.lerp(self.anchor, x, self.spec.outer_rate)
            x.copy_(moved if met is None else torch.where(met, moved, x))

    def after_round(
        self, x: Tensor, memory: Mapping[str, Tensor], rate: Tensor | float, met: Tensor | None
    ) -> None:
        beta = self.spec.outer_momentum
        alpha = 1.0 if self.spec.rate_first else self.spec.outer_rate
        velocity = self.velocity * beta
        velocity.add_(x, alpha=alpha).sub_(self.anchor, alpha=alpha)
        moved = self.anchor + velocity
        if self.spec.nesterov:  # α(x̄ − φ) + βv, where v holds α(x̄ − φ) once already
            moved.sub_(self.velocity, alpha=beta).add_(velocity, alpha=beta)
        for tensor, new in ((self.velocity, velocity), (self.anchor, moved), (x, moved)):
            tensor.copy_(new if met is None else torch.where(met, new, tensor))


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

    With `mixes_first` the round comes before the step (the footnote's rule).
    """

    acts_without_round = True

    def __init__(
        self, spec: Momentum, optimizer: Optimizer, x: Tensor, *, mixes_first: bool = False
    ) -> None:
        assert spec.follow is not None
        self.spec, self.optimizer, self.share = spec, optimizer, spec.follow
        self.pause = max(1.0, spec.pause)
        self.local, self.mixing = torch.zeros_like(x), torch.zeros_like(x)
        self.hat = torch.zeros_like(x) if isinstance(optimizer, SGD) else None
        self._lengths = _block_lengths(self.local)
        self.age = torch.zeros((), dtype=x.dtype, device=x.device)
        pair = self.local, self.mixing
        self._first, self._second = reversed(pair) if mixes_first else pair
        has_gpu = x.is_cuda and not x.numel() % BLOCK and kernels.on_gpu(x.device) is not None
        self._fused = import_module("matcha.training.momentum.fused") if has_gpu else None

    def state(self) -> Mapping[str, Tensor]:
        return {} if self.hat is None else {"age": self.age}

    def adjust_gradient(self, gradients: Tensor) -> None:
        self._lengths.copy_(_block_lengths(gradients))

    def before_step(self, x: Tensor, memory: Mapping[str, Tensor]) -> None:
        self._first.copy_(x)
        if self.hat is not None:
            self.hat.copy_(memory["momentum"])

    def after_step(self, x: Tensor, rate: Tensor | float) -> None:
        self._second.copy_(x)  # the first of step and round is over

    def after_round(
        self, x: Tensor, memory: Mapping[str, Tensor], rate: Tensor | float, met: Tensor | None
    ) -> None:
        if isinstance(self.optimizer, Adam):
            self._part_displacements(x)
            followed = self._followed(x, self.share, _block_lengths(self.local).mul_(self.pause))
            scale = self.optimizer.denominator(memory).mul_((1 - self.optimizer.beta1) / rate)
            memory["first"].addcmul_(followed, scale)
            return
        assert self.hat is not None
        keep = self._grow_old()
        follow, scale = self._follow(keep) * self.share, (1 - keep) / rate
        limits = self._lengths * (rate * (self.pause / (1 - self.optimizer.momentum)))
        places = self._first, self._second, x, self.hat, memory["momentum"]
        if self._fused is not None and all(place.is_contiguous() for place in places):
            numbers = torch.stack([number.view(()) for number in (follow, keep, scale)])
            steps_first = self._first is self.local
            self._fused.fold(*places, limits, numbers, _SWING, steps_first=steps_first)
            return
        self._part_displacements(x)
        followed = self._followed(x, follow, limits)
        torch.mul(self.hat, keep, out=memory["momentum"])
        memory["momentum"].add_(followed.add_(self.local).mul_(scale))

    def after_silent_round(
        self, x: Tensor, memory: Mapping[str, Tensor], rate: Tensor | float
    ) -> None:
        """Fold the step alone into SGD's memory; Adam's follows meetings only.

        What `after_round` does where the round moved nothing, without its bounds on what it moved.
        """
        if self.hat is not None:
            keep = self._grow_old()
            torch.mul(self.hat, keep, out=memory["momentum"])
            memory["momentum"].add_(self._first.sub_(x).mul_((1 - keep) / rate))

    def _part_displacements(self, x: Tensor) -> None:
        """Turn values before, between and after step and round into what each has moved."""
        self._first.sub_(self._second)
        self._second.sub_(x)

    def _followed(self, x: Tensor, share: Tensor | float, limits: Tensor) -> Tensor:
        """What the round has moved, as far as it is followed."""
        followed = self.mixing.mul_(share)
        _shorten_blocks(followed, limits.add_(_block_lengths(x), alpha=_SWING))
        return followed

    def _grow_old(self) -> Tensor:
        """Count an iteration; what the buffer keeps of itself in it."""
        self.age.add_(1.0)
        return (self.age / (self.age + self.spec.warmup)).clamp_(max=self.spec.memory)

    def _follow(self, keep: Tensor) -> Tensor:
        """The share of what μ can hold that a shorter memory can: less, as it comes back sooner."""
        beta, memory = self.optimizer.momentum, self.spec.memory
        whole = 1 - (memory + (1 - memory) * beta) ** self.pause
        soon = 1 - (keep + (1 - keep) * beta).pow(self.pause)
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


def make_rule(
    spec: Momentum, optimizer: Optimizer, x: Tensor, *, mixes_first: bool = False
) -> MomentumRule:
    """The rule of a settled momentum for these parameters."""
    if spec.kind == "quasi-global":
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
