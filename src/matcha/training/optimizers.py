"""SGD, Adam, AdamW and Muon over flat matrices: gradients become update directions in place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from matcha.errors import InputError, PackageError, unknown_name


def _clip(updates: Tensor, limit: float | None) -> None:
    if limit is not None:
        norms = torch.linalg.vector_norm(updates, dim=1, keepdim=True)
        updates.mul_((limit / (norms + 1e-6)).clamp_(max=1.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class SGD:
    """Stochastic gradient descent as ``torch.optim.SGD`` defines it, each worker on its own.

    An optimizer here says how gradients become directions u of the step x ← x − ηu, row by row.

    >>> optimizer, x = SGD(momentum=0.9), torch.zeros(1, 1)
    >>> state, u = optimizer.state(x), torch.ones(1, 1)
    >>> for _ in range(2):
    ...     u.fill_(1.0); optimizer.direct(x, u, state)
    tensor([[1.]])
    tensor([[1.]])
    >>> u
    tensor([[1.9000]])
    """

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    clip_norm: float | None = None
    """Each worker's gradient is scaled down to this Euclidean norm where it is longer."""

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise InputError(f"momentum must be in [0, 1), not {self.momentum}")
        if self.nesterov and not self.momentum:
            raise InputError("nesterov needs a momentum above 0")
        if self.weight_decay < 0:
            raise InputError(f"weight_decay must not be negative: {self.weight_decay}")

    def state(self, parameters: Tensor) -> dict[str, Tensor]:
        """Its memory before the first step: a momentum matrix where momentum is used."""
        return {"momentum": torch.zeros_like(parameters)} if self.momentum else {}

    def direct(self, parameters: Tensor, updates: Tensor, state: dict[str, Tensor]) -> None:
        """Replace the gradients in ``updates`` by directions: clip, weight decay, momentum."""
        _clip(updates, self.clip_norm)
        if self.weight_decay:
            updates.add_(parameters, alpha=self.weight_decay)
        if not self.momentum:
            return
        memory = state["momentum"].mul_(self.momentum).add_(updates)
        if self.nesterov:
            updates.add_(memory, alpha=self.momentum)
        else:
            updates.copy_(memory)

    def for_model(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """``torch.optim.SGD`` of the same settings, for one worker; rates are set step by step.

        Clipping is not a part of PyTorch's optimizers: it stays the training loop's.
        """
        return [
            torch.optim.SGD(
                model.parameters(),
                momentum=self.momentum,
                nesterov=self.nesterov,
                weight_decay=self.weight_decay,
            )
        ]

    def step_fused(
        self, parameters: Tensor, updates: Tensor, state: dict[str, Tensor], rate: Tensor
    ) -> None:
        """:meth:`direct` and x ← x − ηu in one pass over memory; ``updates`` stay gradients.

        The separate operations move each matrix about three times as often, which for sixteen
        ResNet-18 costs a tenth of an iteration. Needs momentum and a CUDA device.
        """
        _clip(updates, self.clip_norm)
        torch._fused_sgd_(
            [parameters],
            [updates],
            [state["momentum"]],
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=rate.float(),
            dampening=0.0,
            nesterov=self.nesterov,
            maximize=False,
            is_first_step=False,
        )

    def directions(self, parameters: Tensor, updates: Tensor, state: dict[str, Tensor]) -> Tensor:
        """The directions of a fused step, from the gradients it left behind."""
        if not self.nesterov:
            return state["momentum"]
        decayed = torch.add(updates, parameters, alpha=self.weight_decay)
        return decayed.add_(state["momentum"], alpha=self.momentum)


@dataclass(frozen=True, kw_only=True, slots=True)
class Adam:
    """Adam as ``torch.optim.Adam`` defines it, or AdamW, each worker on its own."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False
    """Weight decay acts on the weights and not through the gradient, as in AdamW."""
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise InputError(f"Adam's betas must be in [0, 1), not {self.beta1} and {self.beta2}")
        if self.weight_decay < 0:
            raise InputError(f"weight_decay must not be negative: {self.weight_decay}")

    @property
    def momentum(self) -> float:
        """Adam's first moment plays the part of momentum."""
        return self.beta1

    def state(self, parameters: Tensor) -> dict[str, Tensor]:
        """Both moments, and the number of steps, on the device so that it can be captured."""
        return {
            "first": torch.zeros_like(parameters),
            "second": torch.zeros_like(parameters),
            "steps": torch.zeros((), dtype=torch.float64, device=parameters.device),
        }

    def direct(self, parameters: Tensor, updates: Tensor, state: dict[str, Tensor]) -> None:
        """Gradient → direction: clip, weight decay, bias-corrected moments."""
        _clip(updates, self.clip_norm)
        self._direct(parameters, updates, state)

    def _direct(self, parameters: Tensor, updates: Tensor, state: dict[str, Tensor]) -> None:
        if self.weight_decay and not self.decoupled:
            updates.add_(parameters, alpha=self.weight_decay)
        first, second, steps = state["first"], state["second"], state["steps"]
        steps.add_(1)
        first.lerp_(updates, 1 - self.beta1)
        second.mul_(self.beta2).addcmul_(updates, updates, value=1 - self.beta2)
        torch.div(first, self.denominator(state), out=updates)
        if self.weight_decay and self.decoupled:
            updates.add_(parameters, alpha=self.weight_decay)

    def step_fused(
        self, parameters: Tensor, updates: Tensor, state: dict[str, Tensor], rate: Tensor
    ) -> None:
        """:meth:`direct` and x ← x − ηu in one pass over memory; ``updates`` stay gradients.

        Needs a CUDA device.
        """
        _clip(updates, self.clip_norm)
        state["steps"].add_(1)
        step = torch._fused_adamw_ if self.decoupled else torch._fused_adam_
        step(
            [parameters],
            [updates],
            [state["first"]],
            [state["second"]],
            [],
            [state["steps"].float()],
            lr=rate.float(),
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=self.weight_decay,
            eps=self.epsilon,
            amsgrad=False,
            maximize=False,
        )

    def denominator(self, state: Mapping[str, Tensor]) -> Tensor:
        """What the first moment is divided by to become a direction; new memory."""
        first, second, steps = state["first"], state["second"], state["steps"]
        correction1 = (1 - self.beta1**steps).to(first.dtype)
        correction2 = (1 - self.beta2**steps).to(first.dtype)
        return (second / correction2).sqrt_().add_(self.epsilon).mul_(correction1)

    def for_model(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """``torch.optim.Adam`` or ``AdamW`` of the same settings."""
        return [self._for(model.parameters())]

    def _for(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        kind = torch.optim.AdamW if self.decoupled else torch.optim.Adam
        return kind(
            parameters,
            betas=(self.beta1, self.beta2),
            eps=self.epsilon,
            weight_decay=self.weight_decay,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Muon(Adam):
    """Hidden weight matrices by Muon as ``torch.optim.Muon`` defines it, the rest by AdamW.

    Muon steps along its momentum with all singular values made about 1 (Jordan et al., 2024), here
    as long as a step of AdamW (`match_rms_adamw`), so that one rate serves both. Its momentum
    stands where Adam's first moment does.
    """

    decoupled: bool = True
    weight_decay: float = 0.1
    muon_momentum: float = 0.95
    matrices: tuple[tuple[int, int, int], ...] = ()
    """Where the flat rows hold hidden matrices: first place, rows, columns; see `for_rows`."""

    def __post_init__(self) -> None:
        Adam.__post_init__(self)
        if not 0 < self.muon_momentum < 1:
            raise InputError(f"muon_momentum must be in (0, 1), not {self.muon_momentum}")

    def for_rows(self, model: nn.Module, offsets: Mapping[str, int]) -> Muon:
        """The same, told where the parameters of a model stand in flat rows."""
        hidden = {id(p) for p in hidden_matrices(model)}
        found = [(offsets[n], *p.shape) for n, p in model.named_parameters() if id(p) in hidden]
        return replace(self, matrices=tuple((a, b, c) for a, b, c in found))

    def _direct(self, parameters: Tensor, updates: Tensor, state: dict[str, Tensor]) -> None:
        steps = []
        for place, height, width in self.matrices:
            span = slice(place, place + height * width)
            gradient = updates[:, span].view(-1, height, width)
            memory = state["first"][:, span].view_as(gradient)
            memory = memory.lerp(gradient, 1 - self.muon_momentum)
            whole = orthogonalized(gradient.lerp(memory, self.muon_momentum)).to(memory.dtype)
            whole.mul_(0.2 * math.sqrt(max(height, width)))
            steps.append((span, memory.flatten(1), whole.flatten(1)))
        Adam._direct(self, parameters, updates, state)
        for span, flat, step in steps:
            state["first"][:, span] = flat
            updates[:, span] = step.add_(parameters[:, span], alpha=self.weight_decay)

    def for_model(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """``torch.optim.Muon`` for the hidden matrices, ``AdamW`` for the rest.

        Raises:
            PackageError: this PyTorch has no Muon.
        """
        if not hasattr(torch.optim, "Muon"):
            raise PackageError(
                f"Muon needs PyTorch 2.9 or newer, and this is {torch.__version__}: upgrade torch, "
                "or train by adamw."
            )
        hidden = hidden_matrices(model)
        known = {id(p) for p in hidden}
        muon = torch.optim.Muon(
            hidden,
            momentum=self.muon_momentum,
            weight_decay=self.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        return [muon, self._for(p for p in model.parameters() if id(p) not in known)]


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The weights that Muon is for: of linear layers, but the last, and none that embeds words.

    >>> [tuple(p.shape) for p in hidden_matrices(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4)))]
    [(3, 2)]
    """
    modules = list(model.modules())
    embedding = {id(m.weight) for m in modules if isinstance(m, nn.Embedding)}
    linear = [dict(m.named_parameters())["weight"] for m in modules if isinstance(m, nn.Linear)]
    return [weight for weight in linear[:-1] if id(weight) not in embedding]


def orthogonalized(matrices: Tensor) -> Tensor:
    """A batch of matrices with singular values of about 1, by Newton and Schulz's iteration.

    As ``torch.optim.Muon`` does it: five steps in bfloat16, which leaves them between 0.7 and 1.2.
    """
    a, b, c = 3.4445, -4.775, 2.0315
    x = matrices.bfloat16()
    if is_tall := x.shape[-2] > x.shape[-1]:
        x = x.mT
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def adamw(*, weight_decay: float = 0.01, **choices: Any) -> Adam:
    """Adam as ``torch.optim.AdamW`` defines it: weight decay is decoupled, and 0.01 unless said.

    >>> adamw(beta2=0.95)
    Adam(beta1=0.9, beta2=0.95, epsilon=1e-08, weight_decay=0.01, decoupled=True, clip_norm=None)
    """
    return Adam(weight_decay=weight_decay, decoupled=True, **choices)


Optimizer: TypeAlias = SGD | Adam
OPTIMIZERS: Mapping[str, Callable[..., Optimizer]] = {
    "sgd": SGD,
    "adam": Adam,
    "adamw": adamw,
    "muon": Muon,
}
"""Optimizers by the names that PyTorch has for them; choices left out are PyTorch's too."""


def make_optimizer(name: str, **choices: Any) -> Optimizer:
    """An optimizer by name; unknown choices are errors.

    >>> make_optimizer("sgd", momentum=0.9).momentum
    0.9

    Raises:
        InputError: No optimizer has this name, or a choice makes no sense.
    """
    if name not in OPTIMIZERS:
        raise unknown_name("optimizer", name, OPTIMIZERS)
    try:
        return OPTIMIZERS[name](**choices)
    except TypeError as error:
        raise InputError(f"{name}: {error}") from None
