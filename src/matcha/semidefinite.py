"""The small semidefinite programs inside the planner, many at once.

`solve` maximises t subject to

    Σ_j p_j A_j ⪰ t I,   Σ_j p_j a_j ≥ t,   0 ≤ p ≤ 1,   c·p ≤ b

for a stack of instances of one shape, by a primal–dual interior-point method (HKM direction,
Mehrotra's predictor–corrector; Wolkowicz, Saigal, Vandenberghe, Handbook of SDP, chapter 10).
With a dozen variables and matrices of order 10 to 50 the work is a few stacked products, which
is why this is ten times faster here than a general cone solver, and why a search over
decompositions can afford thousands of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

_MAX_ITERATIONS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """Primal and dual solutions of a stack of programs; the first axis numbers the instances."""

    p: Array
    """Primal, strictly inside its bounds."""
    Y: Array
    """Dual of the matrix inequality: positive semidefinite."""
    y: Array
    """Dual of the rows a; trace(Y) + sum(y) = 1."""
    iterations: int


def solve(A: Array, a: Array, c: Array, b: Array, *, tolerance: float = 1e-8) -> Solution:
    """Solve a stack of programs (see the module's first lines) to a relative gap.

    Args:
        A: Symmetric matrices, shape (instances, variables, k, k).
        a: Rows that bound t as well, shape (instances, rows, variables).
        c: Positive costs, shape (instances, variables).
        b: Positive limits, shape (instances,), below c.sum(-1).
        tolerance: Stop when the duality gap is below this fraction of t.

    Returns:
        A strictly feasible p and a dual (Y, y) that is positive and of unit trace, whatever the
        accuracy reached: both ends of the certificate stay valid.
    """
    program = _Program(A, a, c, b)
    x = _start(A, a, c, b)
    S, s = program.slacks(x)
    S_inverse = np.linalg.inv(S)
    mu = 1.0 / (np.trace(S_inverse, axis1=1, axis2=2) + (1.0 / s[:, : program.rows]).sum(1))
    Y, y = mu[:, None, None] * S_inverse, mu[:, None] / s
    active = np.ones(len(A), dtype=bool)

    iterations = 0
    while iterations < _MAX_ITERATIONS:
        mu = _complementarity(S, s, Y, y)
        gap = mu * (S.shape[-1] + s.shape[-1])
        infeasible = np.abs(program.adjoint(Y, y) + program.objective).max(1)
        active &= (gap > tolerance * np.abs(x[:, -1])) | (infeasible > 1e-6)
        if not active.any():
            break
        iterations += 1
        newton = _Newton(program, S, s, Y, y)
        predicted = newton.direction(np.zeros(len(A)), None)
        primal, dual = newton.lengths(predicted)
        mu_predicted = _complementarity(
            S + primal[:, None, None] * predicted.S,
            s + primal[:, None] * predicted.s,
            Y + dual[:, None, None] * predicted.Y,
            y + dual[:, None] * predicted.y,
        )
        centring = np.clip((mu_predicted / mu) ** 3, 1e-6, 1.0)
        move = newton.direction(centring * mu, predicted)
        primal, dual = newton.lengths(move)
        # An instance that rounding has stopped keeps its last point; the others go on.
        active &= move.is_finite() & (np.maximum(primal, dual) > 1e-9)
        x[active] += primal[active, None] * move.x[active]
        Y[active] += dual[active, None, None] * move.Y[active]
        y[active] += dual[active, None] * move.y[active]
        S, s = program.slacks(x)

    values, vectors = np.linalg.eigh(_symmetric(Y))
    # Rounding may leave Y a hair outside the cone; the certificate must not rest on that.
    Y = (vectors * np.maximum(values, 0.0)[:, None]) @ vectors.swapaxes(-1, -2)
    weight = np.trace(Y, axis1=1, axis2=2) + y[:, : program.rows].sum(1)
    return Solution(
        p=x[:, :-1],
        Y=Y / weight[:, None, None],
        y=y[:, : program.rows] / weight[:, None],
        iterations=iterations,
    )


class _Program:
    """The stack with variables x = (p, t): S = Σ_j x_j F_j ⪰ 0, s = R x + h ≥ 0, maximise t."""

    def __init__(self, A: Array, a: Array, c: Array, b: Array) -> None:
        N, M, k, _ = A.shape
        self.rows = a.shape[1]
        self.F = np.concatenate([A, np.broadcast_to(-np.eye(k), (N, 1, k, k))], axis=1)
        self.flat = self.F.reshape(N, M + 1, k * k)
        # The slacks in order: rows a, p >= 0, p <= 1, the limit.
        lower, upper = self.rows, self.rows + M
        self.R = np.zeros((N, upper + M + 1, M + 1))
        self.R[:, :lower, :M], self.R[:, :lower, M] = a, -1.0
        self.R[:, lower:upper, :M] = np.eye(M)
        self.R[:, upper:-1, :M] = -np.eye(M)
        self.R[:, -1, :M] = -c
        self.h = np.zeros((N, upper + M + 1))
        self.h[:, upper:-1] = 1.0
        self.h[:, -1] = b
        self.objective = np.zeros(M + 1)
        self.objective[M] = 1.0

    def slacks(self, x: Array) -> tuple[Array, Array]:
        # At the last digits 1 − p may round to zero; its logarithm must not.
        s = np.maximum(np.einsum("nrj,nj->nr", self.R, x) + self.h, 1e-17)
        return self.matrices(x), s

    def matrices(self, x: Array) -> Array:
        return np.asarray((x[:, None] @ self.flat).reshape(len(x), *self.F.shape[2:]))

    def adjoint(self, Y: Array, y: Array) -> Array:
        flat = Y.reshape(len(Y), -1, 1)
        return np.asarray((self.flat @ flat)[..., 0] + np.einsum("nrj,nr->nj", self.R, y))


class _Direction(NamedTuple):
    x: Array
    S: Array
    s: Array
    Y: Array
    y: Array

    def is_finite(self) -> npt.NDArray[np.bool_]:
        return np.asarray(
            np.isfinite(self.x).all(1)
            & np.isfinite(self.Y).all((1, 2))
            & np.isfinite(self.y).all(1)
        )


class _Newton:
    """The linearised optimality conditions at one point: factorised once, solved twice."""

    def __init__(self, program: _Program, S: Array, s: Array, Y: Array, y: Array) -> None:
        N, n = len(S), program.F.shape[1]
        self.program, self.s, self.Y, self.y = program, s, Y, y
        self.root_S, self.root_Y = _inverse_root(S), _inverse_root(Y)
        self.S_inverse = self.root_S.swapaxes(-1, -2) @ self.root_S
        # H_ij = tr(F_i S⁻¹ F_j Y) for the matrices, Σ_r R_ri R_rj y_r / s_r for the rows.
        Z = self.S_inverse[:, None] @ program.F @ Y[:, None]
        H = Z.swapaxes(-1, -2).reshape(N, n, -1) @ program.flat.swapaxes(-1, -2)
        H = _symmetric(H) + program.R.swapaxes(-1, -2) @ ((y / s)[..., None] * program.R)
        tiny = 1e-15 * np.trace(H, axis1=1, axis2=2)
        self.H_inverse = np.linalg.inv(H + tiny[:, None, None] * np.eye(n))

    def direction(self, mu: Array, second_order: _Direction | None) -> _Direction:
        """Towards complementarity `mu`, corrected for what a first direction left out."""
        program, s, Y, y = self.program, self.s, self.Y, self.y
        dual = mu[:, None, None] * self.S_inverse
        dual_row = mu[:, None] / s
        if second_order is not None:
            dual = dual - _symmetric(second_order.Y @ second_order.S @ self.S_inverse)
            dual_row = dual_row - second_order.y * second_order.s / s
        rhs = program.objective + program.adjoint(dual, dual_row)
        dx = (self.H_inverse @ rhs[..., None])[..., 0]
        dS = program.matrices(dx)
        ds = np.einsum("nrj,nj->nr", program.R, dx)
        dY = dual - Y - _symmetric(Y @ dS @ self.S_inverse)
        return _Direction(dx, dS, ds, dY, dual_row - y - y * ds / s)

    def lengths(self, move: _Direction) -> tuple[Array, Array]:
        """How far the primal and the dual may go along a direction and stay positive."""
        primal = np.minimum(_step(self.root_S, move.S), _ratio(self.s, move.s))
        dual = np.minimum(_step(self.root_Y, move.Y), _ratio(self.y, move.y))
        return primal, dual


def _complementarity(S: Array, s: Array, Y: Array, y: Array) -> Array:
    total = np.einsum("nab,nab->n", S, Y) + np.einsum("nr,nr->n", s, y)
    return np.asarray(total / (S.shape[-1] + s.shape[-1]))


def _start(A: Array, a: Array, c: Array, b: Array) -> Array:
    """A point well inside: an even share of the limit, and t a little below what it allows."""
    share = 0.9 * np.minimum(1.0, b / c.sum(1))
    p = np.broadcast_to(share[:, None], c.shape)
    eigenvalues = np.linalg.eigvalsh(np.einsum("nj,njab->nab", p, A))
    values = np.concatenate([eigenvalues, np.einsum("nrj,nj->nr", a, p)], axis=1)
    t = values.min(1) - 0.3 * values.mean(1)
    return np.concatenate([p, t[:, None]], axis=1)


def _symmetric(X: Array) -> Array:
    return np.asarray(0.5 * (X + X.swapaxes(-1, -2)))


def _inverse_root(X: Array) -> Array:
    """F with F X Fᵀ = I for each positive definite X; rounding below zero is lifted."""
    values, vectors = np.linalg.eigh(X)
    values = np.maximum(values, 1e-16 * values[..., -1:])
    return np.asarray(vectors.swapaxes(-1, -2) / np.sqrt(values)[..., None])


def _step(inverse_root: Array, dX: Array) -> Array:
    """The longest step (at most 1) that keeps X + step·dX positive definite, times 0.97."""
    scaled = inverse_root @ dX @ inverse_root.swapaxes(-1, -2)
    scaled = np.where(np.isfinite(scaled), scaled, 0.0)
    least = np.linalg.eigvalsh(scaled)[..., 0]
    return np.asarray(np.minimum(1.0, 0.97 / np.maximum(-least, 1e-12)))


def _ratio(s: Array, ds: Array) -> Array:
    """The longest step (at most 1) that keeps s + step·ds positive, times 0.97."""
    worst = (-ds / s).max(-1)
    return np.asarray(np.minimum(1.0, 0.97 / np.maximum(worst, 1e-12)))
