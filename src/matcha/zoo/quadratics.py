"""A task whose constants are known exactly: quadratics with chosen L, σ and ζ, for theory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from matcha.errors import InputError
from matcha.theory import admissible_learning_rate, gradient_bound
from matcha.training.task import Evaluation, Task, digest, generator

_SHAPE, _NOISE = 0x5348, 0x4E4F  # purposes of random draws


class Point(nn.Module):
    """A parameter vector and nothing else."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.x = nn.Parameter(start)

    def forward(self) -> Tensor:
        """The vector."""
        return self.x


class QuadraticTask(Task):
    """Fᵢ(x) = ½ (x − bᵢ)ᵀ A (x − bᵢ) with noisy gradients: Assumptions 1 to 4 hold with equality.

    A is diagonal with eigenvalues from L/``condition`` to L. The minima bᵢ differ so that the mean
    of ‖∇Fᵢ − ∇F‖² is ζ² everywhere; a stochastic gradient adds Gaussian noise with E‖ξ‖² = σ².
    A common A is what makes ζ a constant; it also makes the mean of the workers' gradients the
    gradient at their mean, so x̄ does not feel the network, and only the consensus distance does.

    ``smoothness``, ``noise`` and ``heterogeneity`` are L, σ and ζ of Assumptions 1, 3 and 4;
    ``start`` is the distance of the common first iterate from the minimum of F. The bᵢ, the
    direction of that iterate and the noise come from ``seed``.
    """

    name = "quadratic"

    def __init__(
        self,
        num_workers: int,
        *,
        smoothness: float = 1.0,
        noise: float = 1.0,
        heterogeneity: float = 0.0,
        dimension: int = 16,
        condition: float = 10.0,
        start: float = 1.0,
        steps_per_epoch: int = 100,
        seed: int = 0,
    ) -> None:
        if not (smoothness > 0 and condition >= 1 and noise >= 0 and heterogeneity >= 0):
            raise InputError("quadratics need L > 0, condition >= 1, and noise and ζ not negative")
        if dimension < 1 or steps_per_epoch < 1:
            raise InputError("quadratics need a dimension and steps_per_epoch of 1 or more")
        self.num_workers, self.steps_per_epoch, self.seed = num_workers, steps_per_epoch, seed
        self.smoothness, self.noise, self.heterogeneity = smoothness, noise, heterogeneity
        self.dimension = dimension
        random = generator(seed, _SHAPE)
        eigenvalues = np.geomspace(smoothness / condition, smoothness, dimension)
        # Minima in the metric of gradients: A(bᵢ − b̄) has mean square ζ² exactly.
        pulls = random.standard_normal((num_workers, dimension))
        pulls -= pulls.mean(0)
        size = np.sqrt((pulls**2).sum(1).mean())
        pulls *= heterogeneity / size if size > 0 else 0.0
        direction = random.standard_normal(dimension)
        self._eigenvalues = torch.from_numpy(eigenvalues)
        self._minima = torch.from_numpy(pulls / eigenvalues)
        self._start = torch.from_numpy(start * direction / np.linalg.norm(direction))

    @property
    def initial_gap(self) -> float:
        """F(x¹) − F_inf."""
        return float(0.5 * (self._eigenvalues * self._start**2).sum())

    def identity(self) -> dict[str, Any]:
        """The constants, and what was drawn."""
        drawn = (self._eigenvalues, self._minima, self._start)
        return {
            "noise": self.noise,
            "epoch's length": self.steps_per_epoch,
            "losses": digest(*(tensor.numpy() for tensor in drawn)),
        }

    def model(self) -> nn.Module:
        return Point(self._start.clone())

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        self._held = (self._eigenvalues.to(device, dtype), self._minima.to(device, dtype))

    def tables(self, epoch: int) -> dict[str, npt.NDArray[np.generic]]:
        """The gradients' noise."""
        shape = (self.steps_per_epoch, self.dimension)
        scale = self.noise / np.sqrt(self.dimension)
        draws = [
            generator(self.seed, _NOISE, worker, epoch).standard_normal(shape) * scale
            for worker in range(self.num_workers)
        ]
        return {"noise": np.stack(draws, axis=1)}

    def batch(self, rows: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Each worker's minimum, and its gradient noise."""
        minima = self._held[1]
        return minima, rows["noise"].to(minima.dtype)

    def loss(
        self, model: nn.Module, inputs: Tensor, targets: Tensor, state: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Fᵢ(x) + ξᵀx, whose gradient is ∇Fᵢ(x) + ξ."""
        x = model()
        difference = x - inputs
        return 0.5 * (self._held[0] * difference * difference).sum() + (targets * x).sum(), ()

    def evaluate(self, model: nn.Module) -> Evaluation:
        """F(x) − F_inf; the minima's mean is the origin."""
        assert isinstance(model, Point)
        return Evaluation(loss=float(0.5 * (self._held[0] * model.x.detach() ** 2).sum()))

    def training_loss(self, model: nn.Module) -> float:
        """F(x) − F_inf, exactly."""
        return self.evaluate(model).loss

    def gradient_norm(self, model: nn.Module) -> float:
        """‖∇F(x)‖²."""
        assert isinstance(model, Point)
        return float(((self._held[0] * model.x.detach()) ** 2).sum())

    def gradient_bound(self, rho: float, iterations: int, learning_rate: float) -> float | None:
        """Theorem 2 with this task's constants; None where the rate is not admissible."""
        if not rho < 1 or learning_rate > admissible_learning_rate(rho, self.smoothness):
            return None
        return gradient_bound(
            rho=rho,
            num_workers=self.num_workers,
            iterations=iterations,
            learning_rate=learning_rate,
            smoothness=self.smoothness,
            gradient_variance=self.noise**2,
            dissimilarity=self.heterogeneity**2,
            initial_gap=self.initial_gap,
        )
