"""Momentum on real workers: the rules of `matcha.training.momentum` around torch optimizers."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeAlias

import torch

from matcha.distributed.exchange.buckets import Bucket, Slot
from matcha.errors import InputError
from matcha.plans import Plan, PlanLike
from matcha.training.momentum import (
    Momentum,
    MomentumRule,
    MomentumTracking,
    Tracking,
    make_rule,
    resolve_momentum,
)
from matcha.training.optimizers import SGD, Adam, Muon, Optimizer
from matcha.wires.wire import BLOCK

_log = logging.getLogger("matcha")
_Owners: TypeAlias = Mapping[int, tuple[torch.optim.Optimizer, int]]

_MUON: type[torch.optim.Optimizer] = getattr(torch.optim, "Muon", torch.optim.SGD)
"""Muon, which PyTorch has from 2.9 on."""
_SMALL = 1 << 16
"""Parameters of at most this many values share a rule: with a rule for each, a step of a hundred
small ones took 50 times as long. Larger ones are not worth the copies."""


class MomentumRules:
    """What momentum does around each step and round of one worker.

    A step that is left out (a gradient overflowed, a batch was bad) is left out for the rules of
    its parameters too: they do not see that gradient.
    """

    def __init__(
        self,
        asked: Momentum,
        optimizers: Sequence[torch.optim.Optimizer],
        plan: PlanLike,
        buckets: Sequence[Bucket],
    ) -> None:
        kind = describe_optimizers(optimizers)
        if asked.kind == "shared" and all(map(_has_first_moment, optimizers)):
            kind = Adam()  # whatever they are: each has what is to be exchanged
        self.spec = resolve_momentum(asked, kind, plan)
        self.is_needed = self.spec.kind != "local"
        if isinstance(kind, Adam) and isinstance(plan, Plan) and plan.strategy == "allreduce":
            _log.warning(
                "the plan averages parameters after each step. With Adam that is not DDP, which "
                "averages gradients, and which `matcha simulate` shows: compare with DDP itself."
            )
        self.travelling: list[tuple[Bucket, torch.Tensor]] = []
        """What is exchanged beside the parameters, laid out like these buckets."""
        self._parts: list[_RuleGroup] = []
        self._moments: list[tuple[_RuleGroup, torch.Tensor]] = []
        self._meets = True
        self._follows_meetings_alone = self.spec.kind == "quasi-global" and isinstance(kind, Adam)
        held = [bucket for bucket in buckets if bucket.slots and not bucket.volatile]
        owners = _owners(optimizers)
        if self.spec.kind == "tracking":
            alone = optimizers[0] if len(optimizers) == 1 else None
            for k, bucket in enumerate(held):
                self._parts += self._track(k, bucket, alone, owners)
        elif self.spec.messages > 1:
            for bucket in held:
                self._parts += self._accompany(bucket, kind, owners)
        elif self.is_needed:
            self._parts += _follow(self.spec, kind, owners, held)

    def _accompany(self, bucket: Bucket, kind: Optimizer, owners: _Owners) -> Iterator[_RuleGroup]:
        """Parts with a second vector each, and its place among what travels."""
        vectors = torch.zeros_like(bucket.data)
        self.travelling.append((bucket, vectors))
        for slot in _distinct(bucket):
            if id(slot.tensor) not in owners:
                continue
            values = _as_real(slot.tensor.data)
            place = bucket.part(slot, vectors).view(values.shape)
            owner, group = owners[id(slot.tensor)]
            if self.spec.kind == "shared":
                # Of Adam's steps alone is it known what is too long.
                is_adam = isinstance(owner, (torch.optim.Adam, torch.optim.AdamW))
                kind = Adam() if is_adam else SGD()
            rule = make_rule(self.spec, kind, values)
            part = _RuleGroup([slot.name], [slot], owner, group, rule)
            if isinstance(rule, MomentumTracking):
                rule.tracked = place
            else:
                self._moments.append((part, place))
            yield part

    def _track(
        self, index: int, bucket: Bucket, alone: torch.optim.Optimizer | None, owners: _Owners
    ) -> Iterator[_RuleGroup]:
        """Rules whose vector is exchanged: one of them, where one optimizer alone steps all."""
        tracked = torch.zeros_like(bucket.data)
        self.travelling.append((bucket, tracked))
        for slots in [bucket.slots] if alone else [(slot,) for slot in bucket.slots]:
            place = tracked if alone else bucket.part(slots[0], tracked)
            rule = Tracking(self.spec, place)
            rule.tracked = place
            name = str(index) if alone else slots[0].name
            owner = alone or owners.get(id(slots[0].tensor), (None, 0))[0]
            offsets = [slot.offset for slot in slots] if alone else [0]
            yield _RuleGroup([name], slots, owner, 0, rule, offsets, place)

    def state(self) -> Mapping[str, torch.Tensor]:
        """What later iterations depend on beyond the optimizer's own state."""
        return {
            f"{name}/{key}": value
            for part in self._parts
            for key, value in part.rule.state().items()
            for name in part.names
        }

    def forget_steps(self) -> None:
        """Drop what is known of the iteration under way: another state takes its place."""
        for part in self._parts:
            part.has_stepped = False

    def check_saving(self) -> None:
        """Refuse to save between the steps of an iteration what only its end would settle."""
        follows = self.spec.kind in ("quasi-global", "momentum-tracking", "shared")
        if follows and any(part.has_stepped for part in self._parts):
            raise InputError(
                "save() came between the steps of an iteration, whose displacement "
                f"{self.spec.kind} still has to follow: save once all optimizers have stepped."
            )

    def reset(self) -> None:
        """Start again at the parameters' values."""
        for part in self._parts:
            part.rule.reset(part.values())

    def before_step(self, optimizer: torch.optim.Optimizer, *, meets: bool) -> None:
        """An optimizer is about to step; its gradients are there.

        `meets`: whether this worker's round has meetings; without any, rules have less to do.
        """
        if (self._follows_meetings_alone and not meets) or not _unscale(optimizer):
            return
        for part in self._parts:
            if part.optimizer is not optimizer:
                continue
            if part.has_stepped and self.spec.kind == "tracking":
                raise InputError(
                    f"{type(optimizer).__name__} computes several gradients per step, but tracking "
                    "corrects one: use another momentum."
                )
            if part.has_stepped:
                continue
            part.has_stepped = True
            is_bounded = self.spec.kind == "quasi-global" and meets
            gradients = part.gradients() if is_bounded or self.spec.kind == "tracking" else None
            if gradients is not None:
                part.rule.adjust_gradient(gradients)
            if self.spec.kind == "tracking":
                part.put_back("gradients", [slot.tensor.grad for slot in part.slots])
            else:
                part.rule.before_step(part.values(), part.memory())

    def after_step(self, *, meets: bool) -> None:
        """Between the last step of an iteration, or a skipped one, and its round."""
        self._meets = meets
        if self.spec.kind == "quasi-global" and not meets:
            return
        for part in self._parts:
            if part.has_stepped and self.spec.kind != "tracking":
                part.rule.after_step(part.values(), part.rate)
            elif self.spec.steps_first:
                part.rule.after_skipped_step(part.values(), part.rate)
        for part, place in self._moments if meets else ():
            (moment,) = part.changed_memory()[1]
            if moment is None:
                place.zero_()
            else:
                place.copy_(_as_real(moment))

    def before_round(self) -> None:
        """Right before a round in which this worker takes part."""
        for part in self._parts if self.spec.kind == "outer" else ():
            part.rule.before_round(part.values(), None)

    def after_round(self, *, met: bool) -> None:
        """After the round; `met`: whether this worker took part in it."""
        for part, place in self._moments if met else ():
            (moment,) = part.changed_memory()[1]
            if moment is not None:
                _as_real(moment).copy_(place)
        for part in self._parts:
            has_stepped, part.has_stepped = part.has_stepped, False
            if self.spec.kind in ("outer", "exact-diffusion"):
                if met:  # what meetings do is followed, whatever became of this worker's step
                    part.rule.after_round(part.values(), {}, 0.0, None)
            elif self.spec.kind == "quasi-global" and has_stepped and part.has_memory:
                values, memory = part.values(), part.memory()
                if not self._meets:
                    part.rule.after_silent_round(values, memory, part.rate)
                else:
                    part.rule.after_round(values, memory, part.rate, None)
                part.put_back(*part.changed_memory())


@dataclass(slots=True, eq=False)
class _RuleGroup:
    """Parameters that share one rule.

    A parameter alone is worked on where it is. Several are copied side by side into memory of our
    own, a vector `like` another at `offsets`, which a rule passes over as over one. Where no
    optimizer steps them they are mixed alone.
    """

    names: Sequence[str]
    slots: Sequence[Slot]
    optimizer: torch.optim.Optimizer | None
    group: int
    rule: MomentumRule
    offsets: Sequence[int] = ()
    like: torch.Tensor | None = None
    has_stepped: bool = False
    """In the iteration under way, as far as the rule is concerned."""
    copies: dict[str, tuple[torch.Tensor, list[torch.Tensor]]] = field(default_factory=dict)
    """By name: the memory, and where in it each parameter's values are."""

    @property
    def rate(self) -> float:
        """The learning rate; 0 where nothing steps."""
        return float(self.optimizer.param_groups[self.group]["lr"]) if self.optimizer else 0.0

    @property
    def has_memory(self) -> bool:
        """Whether the optimizer remembers anything of them yet."""
        return any(self._states())

    def values(self) -> torch.Tensor:
        """The parameters, as one tensor of real numbers."""
        return self._copy("values", [slot.tensor.data for slot in self.slots])

    def gradients(self) -> torch.Tensor | None:
        """Their gradients; 0 where some have none, None where none has."""
        found = [slot.tensor.grad for slot in self.slots]
        return None if all(g is None for g in found) else self._copy("gradients", found)

    def memory(self) -> Mapping[str, torch.Tensor]:
        """Their state in the optimizer, by the names of `matcha.training.optimizers`."""
        name, moments = self.changed_memory()
        if name == "momentum":
            return {name: self._copy(name, moments)}
        states, device = self._states(), self.slots[0].tensor.device
        steps = [torch.as_tensor(s.get("step", 1.0), device=device) for s in states]
        return {
            name: self._copy(name, moments),
            "second": self._copy("second", [state.get("exp_avg_sq") for state in states]),
            "steps": steps[0] if self.like is None else torch.stack(steps)[self._which(self.like)],
        }

    def changed_memory(self) -> tuple[str, list[torch.Tensor | None]]:
        """What a rule changes in `memory`: its name, and where it belongs."""
        states = self._states()
        is_adam = any("exp_avg" in state for state in states)
        key = "exp_avg" if is_adam else "momentum_buffer"
        return "first" if is_adam else "momentum", [state.get(key) for state in states]

    def put_back(self, name: str, tensors: Sequence[torch.Tensor | None]) -> None:
        """Write what a rule has made of copies to where they are from."""
        pairs = zip(tensors, self.copies[name][1], strict=True) if name in self.copies else ()
        there = [(_as_real(tensor), copy) for tensor, copy in pairs if tensor is not None]
        if there:
            torch._foreach_copy_([tensor for tensor, _ in there], [copy for _, copy in there])

    def _states(self) -> list[Mapping[str, torch.Tensor]]:
        states = self.optimizer.state if self.optimizer is not None else {}
        return [states.get(slot.tensor, {}) for slot in self.slots]

    def _copy(self, name: str, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """The tensors side by side; 0 in place of None. One alone as it is."""
        if self.like is None:
            (tensor,) = tensors
            own = self.slots[0].tensor
            return _as_real(torch.zeros_like(own.data) if tensor is None else tensor)
        if name not in self.copies:
            flat = torch.zeros_like(self.like)
            shapes = [_as_real(slot.tensor.data).shape for slot in self.slots]
            places = zip(self.offsets, shapes, strict=True)
            self.copies[name] = flat, [flat[k : k + n.numel()].view(n) for k, n in places]
        flat, views = self.copies[name]
        there = [
            (view, _as_real(tensor))
            for view, tensor in zip(views, tensors, strict=True)
            if tensor is not None
        ]
        if len(there) < len(views):
            flat.zero_()
        if there:
            torch._foreach_copy_([view for view, _ in there], [tensor for _, tensor in there])
        return flat

    def _which(self, like: torch.Tensor) -> torch.Tensor:
        """For each value of a copy, which parameter it is of."""
        if "which" not in self.copies:
            sizes = torch.diff(torch.tensor([*self.offsets, len(like)]))
            which = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
            self.copies["which"] = which.to(like.device), []
        return self.copies["which"][0]


def _follow(
    spec: Momentum, kind: Optimizer, owners: _Owners, buckets: Sequence[Bucket]
) -> Iterator[_RuleGroup]:
    """The parts of a momentum that exchanges nothing of its own; small parameters share one."""
    small: dict[tuple[object, ...], list[Slot]] = {}
    for bucket in buckets:
        for slot in _distinct(bucket):
            optimizer, group = owners.get(id(slot.tensor), (None, 0))
            values = _as_real(slot.tensor.data)
            if optimizer is None and spec.kind not in ("outer", "exact-diffusion"):
                continue
            if spec.kind == "quasi-global" and values.numel() <= _SMALL:
                key = id(optimizer), group, values.dtype, values.device
                small.setdefault(key, []).append(slot)
            else:
                rule = make_rule(spec, kind, values)
                yield _RuleGroup([slot.name], [slot], optimizer, group, rule)
    for slots in small.values():
        values = _as_real(slots[0].tensor.data)
        # Each begins a block of its own: rules bound a step block by block.
        sizes = [-(-_as_real(s.tensor.data).numel() // BLOCK) * BLOCK for s in slots]
        *offsets, total = accumulate(sizes, initial=0)
        like = torch.zeros(total, dtype=values.dtype, device=values.device)
        optimizer, group = owners[id(slots[0].tensor)]
        names = [slot.name for slot in slots]
        yield _RuleGroup(names, slots, optimizer, group, make_rule(spec, kind, like), offsets, like)


def _distinct(bucket: Bucket) -> Iterable[Slot]:
    """The slots that have a place of their own: tied parameters have one place and one rule."""
    return {slot.offset: slot for slot in reversed(bucket.slots)}.values()


def _owners(optimizers: Iterable[torch.optim.Optimizer]) -> _Owners:
    """The optimizer, and the index of its group, by each parameter's identity."""
    return {
        id(parameter): (optimizer, index)
        for optimizer in optimizers
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }


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


def _as_real(values: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs of real ones: the rules are about real vectors."""
    return torch.view_as_real(values) if values.is_complex() else values


def _has_first_moment(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer remembers what `shared` exchanges: Adam's, SGD's or Muon's."""
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        return all(group["betas"][0] > 0 for group in optimizer.param_groups)
    if not isinstance(optimizer, (torch.optim.SGD, _MUON)):
        return False
    return all(group["momentum"] > 0 for group in optimizer.param_groups)


def describe_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> Optimizer:
    """Return the optimizers as values, as far as momentum must know them; plain SGD for others."""
    kinds = {type(optimizer) for optimizer in optimizers}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if kinds == {torch.optim.SGD}:
        used = {(g["momentum"], g["dampening"], g["maximize"]) for g in groups}
        if len(used) == 1 and used == {(groups[0]["momentum"], 0, False)}:
            return SGD(momentum=float(groups[0]["momentum"]))
    if _MUON in kinds - {torch.optim.SGD} and kinds <= {_MUON, torch.optim.AdamW}:
        return Muon()
    if kinds and kinds <= {torch.optim.Adam, torch.optim.AdamW}:
        first = groups[0]
        names = ("betas", "eps", "amsgrad", "maximize")
        alike = all(group[name] == first[name] for group in groups for name in names)
        if alike and not first["amsgrad"] and not first["maximize"]:
            beta1, beta2 = map(float, first["betas"])
            return Adam(beta1=beta1, beta2=beta2, epsilon=float(first["eps"]))
    return SGD()
