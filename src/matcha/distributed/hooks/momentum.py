"""Momentum on real workers: the rules of `matcha.training.momentum` around torch optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from matcha.distributed.exchange.buckets import Bucket, Slot
from matcha.errors import InputError
from matcha.plans import PlanLike
from matcha.training.momentum import (
    Momentum,
    MomentumRule,
    Tracking,
    make_rule,
    resolve_momentum,
)
from matcha.training.optimizers import SGD, Adam, Optimizer

__all__ = ["MomentumRules", "describe_optimizers"]


@dataclass(slots=True)
class _Ruled:
    """One parameter and its rule; with tracking by one optimizer, a whole bucket's."""

    name: str
    slots: Sequence[Slot]
    optimizer: torch.optim.Optimizer | None
    """What steps them; None where nothing does, and it is mixed alone."""
    rule: MomentumRule
    has_stepped: bool = field(default=False)
    """In the iteration under way, as far as the rule is concerned."""

    @property
    def values(self) -> torch.Tensor:
        """The parameter's, as real numbers."""
        return _as_real(self.slots[0].tensor.data)


class MomentumRules:
    """What momentum does around each step and round of one worker.

    A step that is left out (a gradient overflowed, a batch was bad) is left out for the rules of
    its parameters too: they do not see that gradient.

    Args:
        name: the momentum asked for.
        optimizers: whose memory is changed.
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
        self.is_needed = self.spec.kind != "local"
        self._ruled: list[_Ruled] = []
        self.travelling: list[tuple[Bucket, torch.Tensor]] = []
        """What is exchanged beside the parameters, laid out like these buckets."""
        held = [bucket for bucket in buckets if not bucket.volatile]
        if self.spec.kind == "tracking":
            self._ruled = list(self._tracked(optimizers, held))
        elif self.is_needed:
            self._ruled = list(_followed(self.spec, kind, optimizers, held))

    def _tracked(
        self, optimizers: Sequence[torch.optim.Optimizer], buckets: Sequence[Bucket]
    ) -> Iterator[_Ruled]:
        owners = _owners(optimizers)
        for k, bucket in enumerate(buckets):
            tracked = torch.zeros_like(bucket.data)
            self.travelling.append((bucket, tracked))
            if not bucket.slots:
                continue
            if len(optimizers) == 1:  # one rule for all of it: a few passes over memory
                rule = Tracking(self.spec, tracked)
                rule.tracked = tracked
                yield _Ruled(str(k), bucket.slots, optimizers[0], rule)
                continue
            for slot in bucket.slots:
                place = bucket.part(slot, tracked)
                rule = Tracking(self.spec, place)
                rule.tracked = place
                yield _Ruled(slot.name, (slot,), owners.get(id(slot.tensor)), rule)

    def state(self) -> Mapping[str, torch.Tensor]:
        """What later iterations depend on beyond the optimizer's own state."""
        return {
            f"{one.name}/{key}": value
            for one in self._ruled
            for key, value in one.rule.state().items()
        }

    def reset(self) -> None:
        """Start again at the parameters' values."""
        for one in self._ruled:
            one.rule.reset(one.values)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step; its gradients are there."""
        if not _unscale(optimizer):
            return
        for one in self._ruled:
            if one.optimizer is not optimizer:
                continue
            if one.has_stepped:
                if isinstance(one.rule, Tracking):
                    raise InputError(
                        f"{type(optimizer).__name__} computes several gradients per step, but "
                        "tracking corrects one: use another momentum."
                    )
                continue
            one.has_stepped = True
            if isinstance(one.rule, Tracking):
                _adjust(one.rule, one.slots)
            else:
                gradient = one.slots[0].tensor.grad
                if gradient is not None:
                    one.rule.adjust_gradient(_as_real(gradient))
                one.rule.before_step(one.values, _memory(one))

    def after_step(self) -> None:
        """Between the last step of an iteration and its round."""
        for one in self._ruled:
            if one.has_stepped:
                one.rule.after_step(one.values)

    def after_round(self, *, met: bool) -> None:
        """After the round; `met`: whether this worker took part in it."""
        is_outer = self.spec.kind == "outer"
        rates = dict(self._rates()) if not is_outer else {}
        for one in self._ruled:
            has_stepped, one.has_stepped = one.has_stepped, False
            if is_outer:
                if met:  # the mean is a step of its own, whatever became of this worker's
                    one.rule.after_round(one.values, {}, 0.0, None)
                continue
            parameter, optimizer = one.slots[0].tensor, one.optimizer
            if has_stepped and optimizer is not None and optimizer.state.get(parameter):
                one.rule.after_round(one.values, _memory(one), rates[id(parameter)], None)

    def _rates(self) -> Iterator[tuple[int, float]]:
        for optimizer in {id(o): o for one in self._ruled if (o := one.optimizer)}.values():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield id(parameter), float(group["lr"])


def _owners(
    optimizers: Sequence[torch.optim.Optimizer],
) -> Mapping[int, torch.optim.Optimizer]:
    return {id(p): o for o in optimizers for group in o.param_groups for p in group["params"]}


def _followed(
    spec: Momentum,
    kind: Optimizer,
    optimizers: Sequence[torch.optim.Optimizer],
    buckets: Sequence[Bucket],
) -> Iterator[_Ruled]:
    owners = _owners(optimizers)
    places: set[tuple[int, int]] = set()
    for bucket in buckets:
        for slot in bucket.slots:
            owner = owners.get(id(slot.tensor))
            place = bucket.data.data_ptr(), slot.offset
            if place in places or (owner is None and spec.kind != "outer"):
                continue
            places.add(place)  # tied parameters have one place and one rule
            rule = make_rule(spec, kind, _as_real(slot.tensor.data))
            yield _Ruled(slot.name, (slot,), owner, rule)


def _unscale(optimizer: torch.optim.Optimizer) -> bool:
    """Make the gradients ready for a fused optimizer's step; False where it will leave it out.

    A `GradScaler` leaves it to fused optimizers to divide gradients by the scale and to skip.
    """
    found_inf, scale = (getattr(optimizer, name, None) for name in ("found_inf", "grad_scale"))
    if found_inf is not None and bool(found_inf):
        return False
    if scale is not None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(scale.to(parameter.grad.device))
        optimizer.grad_scale = None  # type: ignore[attr-defined]
    return True


def _adjust(rule: Tracking, slots: Sequence[Slot]) -> None:
    """Correct the gradients of some parameters by what is tracked of their average."""
    gradients = torch.zeros_like(rule.tracked)
    start = slots[0].offset
    places = []
    for slot in slots:
        gradient = slot.tensor.grad
        if gradient is not None:
            real = _as_real(gradient)
            offset = slot.offset - start
            place = gradients[offset : offset + real.numel()].view(real.shape)
            place.copy_(real)
            places.append((place, real))
    rule.adjust_gradient(gradients)
    for place, real in places:
        real.copy_(place)


def _as_real(values: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs of real ones: the rules are about real vectors."""
    return torch.view_as_real(values) if values.is_complex() else values


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


def _memory(one: _Ruled) -> Mapping[str, torch.Tensor]:
    """A parameter's state in the optimizer, by the names of `matcha.training.optimizers`."""
    parameter = one.slots[0].tensor
    state: Mapping[str, Any] = {}
    if one.optimizer is not None:
        state = one.optimizer.state.get(parameter, {})
    if "exp_avg" in state:
        steps = torch.as_tensor(state["step"], device=parameter.device)
        first, second = (_as_real(state[name]) for name in ("exp_avg", "exp_avg_sq"))
        return {"first": first, "second": second, "steps": steps}
    buffer = state.get("momentum_buffer")
    return {"momentum": torch.zeros_like(one.values) if buffer is None else _as_real(buffer)}
