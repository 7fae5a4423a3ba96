"""Cycles of exchanges: their exact steady state, their contraction, and their adjoint.

Disagreement has covariance X. An iteration adds I − J (unit gradient noise, its mean removed) and
then conjugates X with each step's A. Of a matching it is I − Σ w_e (e_i − e_j)(e_i − e_j)ᵀ; where
messages go one way around a cycle of workers, I − w (I − P) there with P the shift. Both touch a
few rows and columns per link: nothing here costs more than O(m²) per step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from matcha._numerics.spectra import Array, Indices
from matcha.topology import Matching, joins_all

_T = TypeVar("_T")


class Step(NamedTuple):
    """What is exchanged at once: the two ends of every link of a matching, or of every message."""

    i: Indices
    """One end; the receiver where messages go one way."""
    j: Indices
    """The other; the sender."""
    weights: Array | None = None
    """What share of the other's value each link carries; None: the cycle's weight."""
    push: bool = False
    """Whether messages go one way: j keeps its share's rest, and i adds the share to its own."""

    def shares(self, weight: float) -> Any:
        """The weights as a column beside the rows that they multiply."""
        return weight if self.weights is None else self.weights[:, None]


Turn: TypeAlias = tuple[int, Sequence[Step]]
"""Some iterations, in the last of which these matchings are exchanged, in order; often one."""
Turns: TypeAlias = Sequence[Turn]
"""A cycle. A stretch in which no worker talks is one turn, so a small budget costs no time here."""

EXACT_UP_TO = 256
"""Workers up to which products of whole cycles are formed."""

_DOUBLINGS = 60
_VANISHED = 1e-13


class SteadyState(NamedTuple):
    """What noisy consensus settles to when a cycle is repeated for ever."""

    covariance: Array
    """X at the end of a cycle."""
    error: float
    """tr(X)/m measured after each iteration's mixing, averaged over the cycle."""


def step(matching: Matching, weights: Sequence[float] | None = None, *, push: bool = False) -> Step:
    """A matching's links, or the messages (sender, receiver) of a push, for the functions below.

    >>> [ends.tolist() for ends in step(((0, 1), (2, 3)))[:2]]
    [[0, 2], [1, 3]]
    """
    ends = np.array(matching, dtype=np.int64).reshape(-1, 2)
    first, second = ends[:, 0].copy(), ends[:, 1].copy()
    shares = None if weights is None else np.array(weights, dtype=np.float64)
    return Step(second, first, shares, True) if push else Step(first, second, shares)


def centering(num_workers: int) -> Array:
    """I − J, which removes the mean."""
    return np.eye(num_workers) - 1 / num_workers


def mix(values: npt.NDArray[np.floating[Any]], ends: Step, weight: float) -> None:
    """Replace rows by A · rows: both ends of a link move towards each other."""
    i, j = ends.i, ends.j
    if ends.push:
        move = ends.shares(weight) * values[j]
        values[j] -= move
        values[i] += move
        return
    a, b = values.take(i, axis=0), values.take(j, axis=0)
    move = ends.shares(weight) * (b - a)
    a += move
    b -= move
    values[i], values[j] = a, b


def mix_back(values: Array, ends: Step, weight: float) -> None:
    """Replace rows by Aᵀ · rows."""
    if not ends.push:
        mix(values, ends, weight)
        return
    values[ends.j] += ends.shares(weight) * (values[ends.i] - values[ends.j])


def conjugate(covariance: Array, ends: Step, weight: float) -> None:
    """Replace X by A X Aᵀ."""
    mix(covariance, ends, weight)
    mix(covariance.T, ends, weight)


def conjugate_back(adjoint: Array, ends: Step, weight: float) -> None:
    """Replace V by Aᵀ V A."""
    mix_back(adjoint, ends, weight)
    mix_back(adjoint.T, ends, weight)


def expected_conjugate(
    X: Array, chain: Sequence[tuple[float, Step]], weight: float = 0.5, *, exclusive: bool = False
) -> Array:
    """E[W X Wᵀ] for W = A_r ··· A_1 whose factors are (probability, matching) in this order.

    With `exclusive` at most one of the factors is drawn.
    """
    start, X = X, X.copy()
    for p, ends in chain:
        before = start if exclusive else X
        mixed = before.copy()
        conjugate(mixed, ends, weight)
        X += p * (mixed - before)
    return X


def turns_of(rounds: Iterable[Sequence[_T]]) -> list[tuple[int, Sequence[_T]]]:
    """Join each stretch of empty rounds with the round that follows it, one round per iteration.

    >>> turns_of([[], [], [0], [1, 2], []])
    [(3, [0]), (1, [1, 2]), (1, [])]
    """
    turns: list[tuple[int, Sequence[_T]]] = []
    idle = 0
    for round_ in rounds:
        idle += 1
        if round_:
            turns.append((idle, round_))
            idle = 0
    return [*turns, (idle, [])] if idle else turns


def length(turns: Turns) -> int:
    """How many iterations a cycle has."""
    return sum(iterations for iterations, _ in turns)


def advance(covariance: Array, turns: Turns, weight: float, noise: Array) -> float:
    """Run X through one cycle in place; the sum of tr X over its iterations."""
    total, fresh = 0.0, float(np.trace(noise))
    for iterations, steps in turns:
        idle = iterations - 1
        total += idle * float(np.trace(covariance)) + fresh * iterations * idle / 2
        covariance += iterations * noise
        for ends in steps:
            conjugate(covariance, ends, weight)
        total += float(np.trace(covariance))
    return total


def retreat(adjoint: Array, turns: Turns, weight: float, prices: list[Array] | None = None) -> None:
    """Run the adjoint V backwards through one cycle in place.

    ⟨V, X⟩ is what a covariance X costs from here on: the sum of the traces it leaves behind. What
    it costs right after each step is put into `prices`, last step first.
    """
    noise = centering(len(adjoint))
    for iterations, steps in reversed(turns):
        adjoint += noise
        for ends in reversed(steps):
            if prices is not None:
                prices.append(adjoint.copy())
            conjugate_back(adjoint, ends, weight)
        adjoint += (iterations - 1) * noise


def price_after_each(turns: Turns, adjoint: Array, weight: float) -> list[Array]:
    """What a covariance costs right after each step of a cycle, from its price V at the end."""
    prices: list[Array] = []
    retreat(adjoint.copy(), turns, weight, prices)
    return prices[::-1]


def transition(turns: Turns, num_workers: int, weight: float) -> Array:
    """Φ − J: what one cycle does to disagreement."""
    return apply_cycle(turns, centering(num_workers), weight)


def lyapunov(transition: Array, source: Array) -> Array | None:
    """The X with X = Φ X Φᵀ + S, by doubling; None where Φ does not contract."""
    X: Array = source.copy()
    F = transition
    for _ in range(_DOUBLINGS):
        size = float(np.abs(F).max())
        if not size < 1e8:
            return None
        if size < 1e-10:
            return X
        X += F @ X @ F.T
        F = F @ F
    return None


def steady_state(turns: Turns, num_workers: int, weight: float) -> SteadyState | None:
    """The exact steady state of a repeated cycle; None where it never reaches consensus.

    >>> pair = (1, [step(((0, 1),))])
    >>> steady_state([pair], 2, 0.5).error, steady_state([pair, (1, [])], 2, 0.5).error
    (0.0, 0.25)
    """
    noise = centering(num_workers)
    X = np.zeros_like(noise)
    advance(X, turns, weight, noise)
    fixed = lyapunov(transition(turns, num_workers, weight), X)
    if fixed is None:
        return None
    X = fixed.copy()
    total = advance(X, turns, weight, noise)
    return SteadyState(covariance=X, error=total / (length(turns) * num_workers))


def steady_adjoint(turns: Turns, num_workers: int, weight: float) -> Array | None:
    """V at the start of a repeated cycle; None where the cycle never reaches consensus."""
    V = np.zeros((num_workers, num_workers))
    retreat(V, turns, weight)
    return lyapunov(transition(turns, num_workers, weight).T, V)


def contraction(turns: Turns, num_workers: int, weight: float) -> float:
    """‖Φ − J‖^(2 / cycle length): the contraction of squared disagreement per iteration.

    It is below 1 exactly when the links of the cycle connect all workers, because a step with
    0 < w < 1 preserves the length of a vector only where the two ends of each link agree.

    >>> contraction([(1, [step(((0, 1),))]), (1, [step(((1, 2),))])], 3, 0.5) < 1
    True
    """
    if num_workers > EXACT_UP_TO:
        return _power_iteration(turns, num_workers, weight)

    rounds = (partial(apply_cycle, [turn], weight=weight) for turn in turns)
    return rescaled_contraction(rounds, num_workers, length(turns))


def rescaled_contraction(
    rounds: Iterable[Callable[[Array], Array]], num_workers: int, iterations: int
) -> float:
    """‖Φ − J‖^(2 / iterations) for the rounds of a cycle, each a function from values to values."""
    # Φ of a long cycle is smaller than rounding: rescale as we go and keep the logarithm.
    product, logarithm = centering(num_workers), 0.0
    for apply in rounds:
        product = apply(product)
        product -= product.mean(axis=0)
        size = float(np.linalg.norm(product))
        if size < _VANISHED * np.sqrt(num_workers):
            return 0.0
        product /= size
        logarithm += float(np.log(size))
    norm = float(np.linalg.norm(product, 2))
    return float(np.exp(2 * (logarithm + np.log(norm)) / iterations))


def _power_iteration(turns: Turns, num_workers: int, weight: float) -> float:
    """The same for many workers, on ΦᵀΦ: from below, good to about 1e-3 of 1 − ρ."""
    x = np.random.default_rng(0).standard_normal((num_workers, 8))
    x -= x.mean(axis=0)
    x, _ = np.linalg.qr(x)
    norm = 0.0
    for _ in range(30):
        y = apply_cycle(turns, x, weight)
        before, norm = norm, float(np.linalg.norm(y, 2))
        if norm < 1e-150:
            return 0.0
        x = y / norm
        for _, steps in reversed(turns):
            for ends in reversed(steps):
                mix_back(x, ends, weight)
        x, _ = np.linalg.qr(x - x.mean(axis=0))
        if abs(norm - before) < 1e-5 * (1 - min(norm, 1 - 1e-12)):
            break
    return float(norm ** (2.0 / length(turns)))


def apply_cycle(turns: Turns, x: Array, weight: float) -> Array:
    """Φ x: values after one cycle; `x` is left alone."""
    x = x.copy()
    for _, steps in turns:
        for ends in steps:
            mix(x, ends, weight)
    return x


def connects(turns: Turns, num_workers: int) -> bool:
    """Whether the links of a cycle join all workers: every cut is crossed.

    Where messages go round cycles of workers, joined workers are also reached.
    """
    ends = [np.stack([step.i, step.j], axis=1) for _, steps in turns for step in steps]
    return joins_all(np.concatenate(ends) if ends else [], num_workers)
