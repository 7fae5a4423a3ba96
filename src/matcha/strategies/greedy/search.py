"""The search for a good cycle of matchings, exactly: greedy runs, then descent.

A matching A maps the covariance of disagreement X to A X A. If V prices covariances, so that
⟨V, X⟩ is what X will cost from here on, then the best next matching minimises ⟨V, A X A⟩.
V = I is plain greed, and the heaviest matching is the answer. Looking ahead, V is what later
matchings leave of X, guessed from the graph here and known exactly in `descent`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np

from matcha._numerics import ProgressCallback, stepper
from matcha._numerics.spectra import Array, Indices, laplacian
from matcha.strategies.greedy.candidates import Candidate, SearchNetwork
from matcha.strategies.greedy.descent import descend, kick
from matcha.theory import cycles

_SHORT = 16
_QUEUES = 16.0


class Options(NamedTuple):
    """How long to search."""

    weights: tuple[float, ...]
    """Weights that greedy runs are tried with; one half is the mean, more is over-relaxation."""
    horizons: tuple[float, ...]
    """Look-aheads that greedy runs are tried with; 0 is plain greed."""
    refine: int
    """How many of the best cycles descend."""
    sweeps: int
    """At most how many passes of descent."""
    kicks: int
    """How often to kick the best short cycle out of its local minimum."""


def heat_price(network: SearchNetwork, horizon: float) -> Array:
    """V when every later matching acts like heat flowing for a while: Σ_k exp(−2k·horizon·L/d̄).

    d̄ is the mean degree. Directions that the graph smooths slowly are worth more.
    """
    m = network.num_workers
    if horizon == 0:
        return cycles.centering(m)
    flows = np.ones(len(network.links))
    if network.loads is not None:
        # Links that queue on a wire are used less: what only they can smooth is worth more.
        flows = 1 / (1 + _QUEUES * network.loads.sum(axis=0) / network.seconds)
    values, vectors = np.linalg.eigh(laplacian(network.links, m, flows).toarray())
    flow = 2 * horizon * values[1:] / (2 * flows.sum() / m)
    price: Array = (vectors[:, 1:] / -np.expm1(-flow)) @ vectors[:, 1:].T
    return price


class Disagreement(Protocol):
    """What greed looks at: the covariance X itself, or copies of the noisy consensus."""

    def wait(self, iterations: int) -> None:
        """Add the noise of some iterations."""

    def choose(self) -> Indices:
        """The matching that gains most for its time."""

    def exchange(self, chosen: Indices) -> None:
        """Mix over a matching."""


class Covariance:
    """X itself, and the mean of tr(X)/m over the iterations so far."""

    def __init__(self, network: SearchNetwork, weight: float, price: Array, start: Array) -> None:
        self._network, self._weight, self._X = network, weight, start.copy()
        self._sides = network.sides(price)
        self._own = network.across(self._sides)
        self._noise = cycles.centering(network.num_workers)
        self._total, self._iterations = 0.0, 0

    def wait(self, iterations: int) -> None:
        if self._iterations:
            self._total += float(np.trace(self._X))
        # Traces after each iteration but the last, in which something may happen.
        idle, m = iterations - 1, len(self._X)
        self._total += idle * float(np.trace(self._X)) + (m - 1) * iterations * idle / 2
        self._X += iterations * self._noise
        self._iterations += iterations

    def choose(self) -> Indices:
        i, j = self._network.links.T
        B, edge, w = self._X[i] - self._X[j], np.arange(len(i)), self._weight
        spread = B[edge, i] - B[edge, j]
        gains = 2 * w * np.einsum("ek,ek->e", B, self._sides) - w**2 * spread * self._own
        chosen = self._network.best_by_time(gains)
        if chosen is None:
            # Exact consensus (a hypercube can): nothing to gain, any matching will do.
            chosen = self._network.best_by_time(np.ones(len(i)) / self._network.seconds)
            assert chosen is not None
        return chosen

    def exchange(self, chosen: Indices) -> None:
        cycles.conjugate(self._X, self._network.ends(chosen), self._weight)

    @property
    def error(self) -> float:
        """The mean of tr(X)/m over the iterations so far."""
        return (self._total + float(np.trace(self._X))) / (self._iterations * len(self._X))


def greedy_run(
    network: SearchNetwork, state: Disagreement, count: int, step: Callable[[], None] = lambda: None
) -> tuple[list[Indices], list[Fraction]]:
    """Spend time greedily as it accrues, for at least `count` matchings: these, and their times.

    With equal links the next matching is the heaviest one; with link times, the one with the
    best gain per second among the heaviest of all links up to each time.
    """
    matchings: list[Indices] = []
    costs: list[Fraction] = []
    credit, cheapest = Fraction(0), network.limits[0]
    while len(matchings) < count:
        wait = max(1, math.ceil((cheapest - credit) / network.rate))
        state.wait(wait)
        credit += wait * network.rate
        while credit >= cheapest:
            chosen = state.choose()
            cost = network.cost(chosen)
            if cost > credit:
                # Save up for it: what accrues meanwhile may change the choice.
                break
            state.exchange(chosen)
            credit -= cost
            matchings.append(chosen)
            costs.append(cost)
            if len(matchings) <= count:  # an iteration may bring a few more
                step()
    return matchings, costs


def window_sizes(costs: Sequence[Fraction], rate: Fraction, wanted: Sequence[int]) -> list[int]:
    """How many of the last matchings to repeat: near the wanted numbers, wasting little time.

    A cycle takes a whole number of iterations, so what accrues beyond its cost is lost.
    """
    totals = list(accumulate(reversed(costs)))  # of the last one, two, …

    def waste(size: int) -> float:
        total = totals[size - 1]
        return round(float(math.ceil(total / rate) * rate / total) - 1, 6)

    sizes = set()
    for want in wanted:
        least, most = (min(n, len(costs)) for n in (want, math.ceil(1.25 * want)))
        sizes.add(min(range(least, most + 1), key=waste))
    return sorted(sizes)


def best_cycle(
    network: SearchNetwork,
    options: Options,
    lengths: Sequence[int],
    starts: Sequence[Candidate] = (),
    progress: ProgressCallback | None = None,
) -> tuple[Candidate, float]:
    """Run greedily with several weights and look-aheads, repeat the best windows, and descend.

    Cycles known beforehand, the starts, are considered as well. Beside the best one, of about as
    many matchings as a length says, stands the least error of a greedy run that never repeats.
    """
    m, longest = network.num_workers, math.ceil(1.25 * max(lengths)) + 1
    candidates, shorts, endless = [], [], math.inf
    total = len(options.horizons) * len(options.weights) + options.refine
    what = f"cycles of about {max(lengths)} matchings at most"
    step = stepper(total + (2 if options.kicks else 0), what, progress)
    for horizon in options.horizons:
        price = heat_price(network, horizon)
        for weight in options.weights:
            start, windows = np.zeros((m, m)), []
            for leg in range(2):
                run = Covariance(network, weight, price, start)
                matchings, costs = greedy_run(network, run, longest)
                windows += [
                    Candidate(
                        network=network,
                        matchings=tuple(matchings[-size:]),
                        costs=tuple(costs[-size:]),
                        weight=weight,
                    ).with_error()
                    for size in window_sizes(costs, network.rate, lengths)
                ]
                best = min(windows, key=_error)
                if leg == 0 and math.isfinite(best.error):
                    # Continue from where the cycle settles: from X = 0 that could take long.
                    state = cycles.steady_state(best.turns(), m, weight)
                    start = start if state is None else state.covariance
            shorts += [window for window in windows if len(window.matchings) <= _SHORT]
            candidates.append(best)
            step()
            if math.isfinite(best.error):
                endless = min(endless, run.error)
    ranked = _distinct([*candidates, *starts])
    finalists = ranked[options.refine : options.refine + 1]
    for candidate in ranked[: options.refine]:
        finalists.append(descend(candidate, options.sweeps))
        step()
    # In a short cycle a kick is felt everywhere, and descending again is quick.
    for candidate in _distinct(shorts)[: 2 if options.kicks else 0]:
        if math.isfinite(candidate.error):
            local = descend(candidate, options.sweeps)
            finalists.append(kick(local, options.kicks, options.sweeps))
            step()
    return min(finalists, key=_error), endless


def _error(candidate: Candidate) -> float:
    return candidate.error


def _distinct(candidates: Iterable[Candidate]) -> list[Candidate]:
    """By their errors, without repetitions: equal errors mean nearly the same cycle."""
    kept: list[Candidate] = []
    for candidate in sorted(candidates, key=_error):
        if not kept or candidate.error > kept[-1].error * (1 + 1e-6):
            kept.append(candidate)
    return kept
