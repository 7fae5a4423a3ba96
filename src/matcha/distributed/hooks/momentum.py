"""Momentum on real workers: the rules of `matcha.training.momentum` around a torch optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from matcha.distributed.exchange.buckets import Bucket
from matcha.plans import PlanLike
from matcha.training.momentum import Momentum, MomentumRule, Tracking, make_rule, resolve_momentum
from matcha.training.optimizers import SGD, Adam, Optimizer

__all__ = ["Following", "describe_optimizers"]


@dataclass(frozen=True, slots=True)
class _Followed:
    """One parameter, who steps it, and the rule that follows it."""

    name: str
    parameter: torch.Tensor
    optimizer: torch.optim.Optimizer
    rule: MomentumRule


class Following:
    """What momentum does around each step and round of one worker.

    Args:
        name: the momentum asked for.
        optimizers: whose memory is followed.
        plan: says how often workers meet.
        buckets: where the parameters lie.

    Raises:
        InputError: it cannot go with these optimizers.
    """

    def __init__(
        self,
        name: str | Momentum,
        optimizers: Sequence[torch.optim.Optimizer],
        plan: PlanLike,
        buckets: Sequence[Bucket],
    ) -> None:
        kind = describe_optimizers(optimizers)
        self.spec = resolve_momentum(name, kind, plan)
        is_local = self.spec.kind == "local"
        self.is_needed = not is_local
        self._tracked: list[tuple[Bucket, Tracking]] = []
        self._followed: list[_Followed] = []
        self._began = False
        held = [bucket for bucket in buckets if not bucket.volatile]
        if self.spec.kind == "tracking":
            self._tracked = [(bucket, Tracking(self.spec, bucket.data)) for bucket in held]
        elif not is_local:
            self._followed = list(_followed(self.spec, kind, optimizers, held))

    @property
    def travelling(self) -> list[tuple[Bucket, torch.Tensor]]:
        """What is exchanged beside the parameters, laid out like these buckets."""
        return [(bucket, rule.tracked) for bucket, rule in self._tracked]

    def state(self) -> Mapping[str, torch.Tensor]:
        """What later iterations depend on beyond the optimizer's own state."""
        named = {
            f"{one.name}/{key}": value
            for one in self._followed
            for key, value in one.rule.state().items()
        }
        for k, (_, tracking) in enumerate(self._tracked):
            named |= {f"{k}/{key}": value for key, value in tracking.state().items()}
        return named

    def reset(self) -> None:
        """Start afresh at the parameters' values."""
        for one in self._followed:
            one.rule.reset(one.parameter.data)
        for bucket, tracking in self._tracked:
            tracking.reset(bucket.data)

    def begin(self) -> None:
        """The optimizer is about to step; may come several times an iteration."""
        if self._began:
            return
        self._began = True
        for bucket, tracking in self._tracked:
            _turn(bucket, tracking)
        for one in self._followed:
            if one.parameter.grad is not None:
                one.rule.adjust_gradient(one.parameter.grad)
            one.rule.before_step(one.parameter.data, _memory(one))

    def middle(self) -> None:
        """Between the step and the round."""
        for one in self._followed:
            one.rule.after_step(one.parameter.data)

    def end(self, *, met: bool) -> None:
        """After the round; `met`: whether this worker took part in it."""
        self._began = False
        is_outer = self.spec.kind == "outer"
        if is_outer and not met:
            return
        rates = dict(self._rates())
        for one in self._followed:
            if is_outer or one.optimizer.state.get(one.parameter):
                one.rule.after_round(
                    one.parameter.data, _memory(one), rates[id(one.parameter)], None
                )

    def _rates(self) -> Iterator[tuple[int, float]]:
        for optimizer in {id(one.optimizer): one.optimizer for one in self._followed}.values():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield id(parameter), float(group["lr"])


def _followed(
    spec: Momentum,
    kind: Optimizer,
    optimizers: Sequence[torch.optim.Optimizer],
    buckets: Sequence[Bucket],
) -> Iterator[_Followed]:
    owners = {id(p): o for o in optimizers for group in o.param_groups for p in group["params"]}
    for bucket in buckets:
        for slot in bucket.slots:
            if id(slot.tensor) in owners:
                rule = make_rule(spec, kind, slot.tensor.data)
                yield _Followed(slot.name, slot.tensor, owners[id(slot.tensor)], rule)


def _turn(bucket: Bucket, tracking: Tracking) -> None:
    """Put the gradients of a bucket's parameters right by what is tracked of their average."""
    gradients = torch.zeros_like(bucket.data)
    places = []
    for slot in bucket.slots:
        grad = slot.tensor.grad
        if grad is not None:
            place = gradients[slot.offset : slot.offset + grad.numel()].view(grad.shape)
            place.copy_(grad)
            places.append((place, grad))
    tracking.adjust_gradient(gradients)
    for place, grad in places:
        grad.copy_(place)


def describe_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> Optimizer:
    """Return the optimizers as values, as far as momentum must know them; plain SGD for others."""
    kinds = {type(optimizer) for optimizer in optimizers}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if kinds == {torch.optim.SGD}:
        used = {(g["momentum"], g["dampening"], g["maximize"]) for g in groups}
        if len(used) == 1 and used == {(groups[0]["momentum"], 0, False)}:
            return SGD(momentum=float(groups[0]["momentum"]))
    if kinds and kinds <= {torch.optim.Adam, torch.optim.AdamW}:
        first = groups[0]
        names = ("betas", "eps", "amsgrad", "maximize")
        alike = all(group[name] == first[name] for group in groups for name in names)
        if alike and not first["amsgrad"] and not first["maximize"]:
            beta1, beta2 = map(float, first["betas"])
            return Adam(beta1=beta1, beta2=beta2, epsilon=float(first["eps"]))
    return SGD()


def _memory(one: _Followed) -> Mapping[str, torch.Tensor]:
    """A parameter's part of the optimizer's state, by the names of `matcha.training.optimizers`."""
    state = one.optimizer.state.get(one.parameter, {})
    if "exp_avg" in state:
        steps = torch.as_tensor(state["step"], device=one.parameter.device)
        return {"first": state["exp_avg"], "second": state["exp_avg_sq"], "steps": steps}
    buffer = state.get("momentum_buffer")
    return {"momentum": torch.zeros_like(one.parameter.data) if buffer is None else buffer}
