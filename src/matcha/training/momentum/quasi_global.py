"""Quasi-global momentum: the buffer follows the worker's displacement, mixing included."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib import import_module
from itertools import islice

import torch
from torch import Tensor
from torch.nn import functional

from matcha.plans import PlanLike
from matcha.training.momentum.rule import MomentumRule
from matcha.training.momentum.settings import Momentum
from matcha.training.optimizers import SGD, Adam, Optimizer
from matcha.wires import kernels
from matcha.wires.wire import BLOCK

_SAMPLE = 2000  # rounds looked at to know how often a worker meets another
_OVERSHOOT = 0.5
"""What quasi-global momentum may add to a meeting's displacement before the next meeting.

Followed whole, a displacement Δ comes back as β/(1 − β) = 9 times Δ, spread over a hundred
iterations. With meetings in between they correct it; with few, workers swing past each other, and
run away once more than Δ comes back from one meeting to the next. A wire's noise is part of Δ and
no meeting corrects: the more of a difference it leaves, the less may come back (measured with
gradients of pure noise, where 3 bits and a meeting in 4.5 iterations hold 0.25, one in 11 too).
"""
_SWING = 0.05
"""The share of a block's own length that a meeting may move it by and be followed whole: where two
workers differ by all they have, a tenth of that is followed, which rare meetings hold too."""


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

    acts_without_round = True

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
        has_gpu = x.is_cuda and not x.numel() % BLOCK and kernels.on_gpu(x.device) is not None
        self._fused = import_module("matcha.training.momentum.fused") if has_gpu else None

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
        self._second.copy_(x)

    def after_round(
        self, x: Tensor, memory: Mapping[str, Tensor], rate: Tensor | float, met: Tensor | None
    ) -> None:
        """Fold the displacement into the optimizer's memory."""
        assert self.spec.follow is not None
        pause = max(1.0, self.spec.pause)
        if self.hat is not None:
            keep = self._grow_old()
            follow, scale = self._follow(keep) * self.spec.follow, (1 - keep) / rate
            reach = rate * (pause / (1 - self.optimizer.momentum))
            places = self._first, self._second, x, self.hat, memory["momentum"]
            if self._fused is not None and all(place.is_contiguous() for place in places):
                limits = self._lengths * reach
                numbers = torch.stack([number.view(()) for number in (follow, keep, scale)])
                steps_first = self._first is self.local
                self._fused.fold(*places, limits, numbers, _SWING, steps_first=steps_first)
                return
            self._part_displacements(x)
            followed = self.mixing.mul_(follow)
            limit = (self._lengths * reach).add_(_block_lengths(x), alpha=_SWING)
            _shorten_blocks(followed, limit)
            torch.mul(self.hat, keep, out=memory["momentum"])
            memory["momentum"].add_(followed.add_(self.local).mul_(scale))
            return
        self._part_displacements(x)
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
            memory["momentum"].add_(self._first.sub_(x).mul_((1 - keep) / rate))

    def _part_displacements(self, x: Tensor) -> None:
        """Turn values before, between and after step and round into what each has moved."""
        self._first.sub_(self._second)
        self._second.sub_(x)

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
