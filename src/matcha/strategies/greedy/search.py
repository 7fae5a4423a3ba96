"""The search for a good cycle of matchings, exactly: greedy runs, then descent.

A matching A maps the covariance of disagreement X to A X A. If V prices covariances, so that
⟨V, X⟩ is what X will cost from here on, then the best next matching minimises ⟨V, A X A⟩.
V = I is plain greed, and the heaviest matching is the answer. Looking ahead, V is what later
matchings leave of X, guessed from the graph here and known exactly in `descent`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

import numpy as np

from matcha._numerics import ProgressCallback, stepper
from matcha._numerics.spectra import Array, Indices, laplacian
from matcha.strategies.greedy.candidates import Candidate, Network
from matcha.strategies.greedy.descent import SWEEPS, descend, kick
from matcha.theory import cycles

WEIGHTS = (0.5, 0.55, 0.6, 0.65)
"""Weights that greedy runs are tried with; one half is the mean, more is over-relaxation."""
HORIZONS = (0.0, 1.0, 2.0, 4.0)
"""Look-aheads that greedy runs are tried with; 0 is plain greed."""

_SHORT = 16
_QUEUES = 16.0


def heat_price(network: Network, horizon: float) -> Array:
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
    L = laplacian(network.links, m, flows).toarray()
    values, vectors = np.linalg.eigh(L)
    flow = 2 * horizon * values[1:] / (2 * flows.sum() / m)
    price: Array = (vectors[:, 1:] / -np.expm1(-flow)) @ vectors[:, 1:].T
    return price


def greedy_run(
    network: Network, *, weight: float, price: Array, start: Array, count: int
) -> tuple[list[Indices], list[Fraction], float]:
    """Spend time greedily as it accrues, from a covariance, for at least `count` matchings.

    With equal links the next matching is the heaviest one; with link times, the one with the
    best gain per second among the heaviest of all links up to each time.

    Returns:
        The matchings, their times, and the mean of tr(X)/m over the iterations of the run.
    """
    m, (i, j) = network.num_workers, network.links.T
    noise = cycles.centering(m)
    D = network.sides(price)
    own = network.across(D)
    X, credit, total, iterations = start.copy(), Fraction(0), 0.0, 0
    matchings: list[Indices] = []
    costs: list[Fraction] = []
    cheapest = network.limits[0]
    while len(matchings) < count:
        wait = max(1, math.ceil((cheapest - credit) / network.rate))
        # Traces after each of the wait's iterations but the last, in which something may happen.
        total += (wait - 1) * float(np.trace(X)) + (m - 1) * wait * (wait - 1) / 2
        X += wait * noise
        credit += wait * network.rate
        iterations += wait
        while credit >= cheapest:
            B = X[i] - X[j]
            spread = B[np.arange(len(i)), i] - B[np.arange(len(i)), j]
            gains = 2 * weight * np.einsum("ek,ek->e", B, D) - weight**2 * spread * own
            chosen = _best_by_time(network, gains)
            if chosen is None:
                # Exact consensus (a hypercube can): nothing to gain, any matching will do.
                chosen = _best_by_time(network, np.ones(len(i)) / network.seconds)
                assert chosen is not None
            cost = network.cost(chosen)
            if cost > credit:
                # Save up for it: what accrues meanwhile may change the choice.
                break
            cycles.conjugate(X, network.ends(chosen), weight)
            credit -= cost
            matchings.append(chosen)
            costs.append(cost)
        total += float(np.trace(X))
    return matchings, costs, total / (iterations * m)


def _best_by_time(network: Network, gains: Array) -> Indices | None:
    """The matching with the best gain for its time; None where no link gains."""
    best, best_rate = None, 0.0
    for chosen in network.options(gains):
        if len(chosen):
            rate = float(gains[chosen].sum()) / float(network.cost(chosen))
            if rate > best_rate:
                best, best_rate = chosen, rate
    return best


def window_sizes(costs: Sequence[Fraction], rate: Fraction, wanted: Sequence[int]) -> list[int]:
    """How many of the last matchings to repeat: near the wanted numbers, wasting little time.

    A cycle takes a whole number of iterations, so what accrues beyond its cost is lost.
    """
    sizes = []
    totals = list(accumulate(reversed(costs)))  # of the last one, two, …
    for want in wanted:
        options = range(min(want, len(costs)), min(math.ceil(1.25 * want), len(costs)) + 1)
        sizes.append(min(options, key=lambda n: (round(_waste(totals[n - 1], rate), 6), n)))
    return sorted(set(sizes))


def _waste(total: Fraction, rate: Fraction) -> float:
    return float(math.ceil(total / rate) * rate / total) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best cycle found, and what it is measured against."""

    best: Candidate
    endless: float
    """The error of the endless greedy sequence that the best cycle started from."""


def best_cycle(
    network: Network,
    *,
    lengths: Sequence[int],
    weights: Sequence[float] = WEIGHTS,
    horizons: Sequence[float] = HORIZONS,
    refine: int = 3,
    sweeps: int = SWEEPS,
    kicks: int = 0,
    starts: Sequence[Candidate] = (),
    progress: ProgressCallback | None = None,
) -> Found:
    """Run greedily with several weights and look-aheads, repeat the best windows, and descend.

    Args:
        network: The links and their times.
        lengths: About how many matchings a cycle may have.
        weights: Weights to try.
        horizons: Look-aheads to try.
        refine: How many of the best cycles to refine.
        sweeps: At most how many passes of refinement.
        kicks: How often to kick the best short cycle out of its local minimum.
        starts: Cycles known beforehand, with their errors, to be considered as well.
        progress: Called with (done, total, "cycles of about … matchings at most") after each.
    """
    m, longest = network.num_workers, math.ceil(1.25 * max(lengths)) + 1
    candidates: list[Candidate] = []
    shorts: list[Candidate] = []
    endless = math.inf
    total = len(horizons) * len(weights) + refine + (2 if kicks else 0)
    step = stepper(total, f"cycles of about {max(lengths)} matchings at most", progress)
    for horizon in horizons:
        price = heat_price(network, horizon)
        for weight in weights:
            start = np.zeros((m, m))
            best: Candidate | None = None
            for leg in range(2):
                matchings, costs, error = greedy_run(
                    network, weight=weight, price=price, start=start, count=longest
                )
                for size in window_sizes(costs, network.rate, lengths):
                    candidate = Candidate(
                        network=network,
                        matchings=tuple(matchings[-size:]),
                        costs=tuple(costs[-size:]),
                        weight=weight,
                    ).with_error()
                    if best is None or candidate.error < best.error:
                        best = candidate
                    if size <= _SHORT and math.isfinite(candidate.error):
                        shorts.append(candidate)
                assert best is not None
                state = None
                if leg == 0 and math.isfinite(best.error):
                    # Continue from where the cycle settles: from X = 0 that could take long.
                    state = cycles.steady_state(best.turns(), m, weight)
                start = start if state is None else state.covariance
            assert best is not None
            candidates.append(best)
            step()
            if math.isfinite(best.error):
                endless = min(endless, error)
    candidates += starts
    candidates.sort(key=lambda candidate: candidate.error)
    candidates = _distinct(candidates)
    finalists = []
    for candidate in candidates[:refine]:
        finalists.append(descend(candidate, sweeps))
        step()
    finalists += candidates[refine : refine + 1]
    # In a short cycle a kick is felt everywhere, and descending again is quick.
    if kicks:
        shorts.sort(key=lambda candidate: candidate.error)
        for candidate in _distinct(shorts)[:2]:
            finalists.append(kick(descend(candidate, sweeps), kicks, sweeps))
            step()
    return Found(best=min(finalists, key=lambda candidate: candidate.error), endless=endless)


def _distinct(candidates: list[Candidate]) -> list[Candidate]:
    """Without repetitions of nearly the same cycle: equal errors mean equal cycles."""
    kept: list[Candidate] = []
    for candidate in candidates:
        if not kept or candidate.error > kept[-1].error * (1 + 1e-6):
            kept.append(candidate)
    return kept
