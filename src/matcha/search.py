"""The search for a good cycle of matchings, exactly: greedy runs, then descent by the adjoint.

A matching A maps the covariance of disagreement X to A X A. If V prices covariances, so that
⟨V, X⟩ is what X will cost from here on, then the best next matching minimises ⟨V, A X A⟩; with
S its links, w the weight and b_e = e_i − e_j,

    ⟨V, X⟩ − ⟨V, A X A⟩ = Σ_e 2w b_eᵀX V b_e − w² Σ_{e,f} (b_eᵀX b_f)(b_eᵀV b_f).

V = I is plain greed: the terms with e ≠ f vanish, and the heaviest matching is the answer.
Looking ahead, V is what later matchings leave of X: first guessed from the graph, then, once
there is a whole cycle, known exactly (its adjoint), which makes replacing one matching at a time
by the best one a descent on the true steady-state error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from matcha import cycles
from matcha.cycles import Array, Step
from matcha.heaviest import Indices, heaviest_matching

WEIGHTS = (0.5, 0.55, 0.6, 0.65)
"""Weights that greedy runs are tried with; one half is the mean, more is over-relaxation."""
HORIZONS = (0.0, 1.0, 2.0, 4.0)
"""Look-aheads that greedy runs are tried with; 0 is plain greed."""

_MAX_CLASSES = 12
_SWEEPS = 12
_SHORT = 16
_HEAVIEST_WEIGHT = 0.95


@dataclass(frozen=True, kw_only=True)
class Network:
    """What the search may use: links, the time each takes, and the time that accrues."""

    num_workers: int
    links: Indices
    times: tuple[Fraction, ...]
    """The time of each link; a matching takes as long as its slowest."""
    rate: Fraction
    """Communication time that accrues an iteration."""
    samples: Array | None = None
    """Measured times, a row a measurement and a column a link; then a matching takes the mean of
    its slowest link's."""
    seconds: Array = field(init=False, repr=False)
    limits: tuple[Fraction, ...] = field(init=False, repr=False)
    """Times up to which links are considered together: a quick matching leaves slow links out."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "seconds", np.array([float(t) for t in self.times]))
        distinct = sorted(set(self.times))
        if len(distinct) > _MAX_CLASSES:
            places = np.linspace(0, len(distinct) - 1, _MAX_CLASSES).round().astype(int)
            distinct = [distinct[place] for place in places]
        object.__setattr__(self, "limits", tuple(distinct))

    def cost(self, chosen: Indices) -> Fraction:
        """The time of a matching."""
        if self.samples is not None:
            return Fraction(float(self.samples[:, chosen].max(axis=1).mean()))
        slowest = int(chosen[np.argmax(self.seconds[chosen])])
        return self.times[slowest]

    def ends(self, chosen: Indices) -> Step:
        """The ends of a matching's links."""
        return self.links[chosen, 0], self.links[chosen, 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A cycle of matchings with one weight for all of them."""

    network: Network
    matchings: tuple[Indices, ...]
    """Positions of links, in the order of exchange."""
    costs: tuple[Fraction, ...]
    weight: float
    error: float = math.inf

    def numbers(self) -> list[list[int]]:
        """For each iteration, which of the matchings are exchanged in it."""
        return timeline(self.costs, self.network.rate)

    def rounds(self) -> list[list[Step]]:
        """For each iteration, the ends of its matchings."""
        steps = [self.network.ends(chosen) for chosen in self.matchings]
        return [[steps[n] for n in numbers] for numbers in self.numbers()]

    def scored(self) -> Candidate:
        """The same with its exact steady-state error."""
        rounds, m = self.rounds(), self.network.num_workers
        state = cycles.steady_state(rounds, m, self.weight) if cycles.connects(rounds, m) else None
        return replace(self, error=math.inf if state is None else state.error)


def timeline(costs: Sequence[Fraction], rate: Fraction) -> list[list[int]]:
    """Spend time as it accrues: for each iteration, the matchings that become affordable in it.

    >>> timeline([Fraction(1)] * 3, Fraction(1, 2))
    [[], [0], [], [1], [], [2]]
    >>> timeline([Fraction(1)] * 5, Fraction(5, 2))
    [[0, 1], [2, 3, 4]]
    """
    total = sum(costs, start=Fraction(0))
    rounds: list[list[int]] = [[] for _ in range(math.ceil(total / rate))]
    spent = Fraction(0)
    for n, cost in enumerate(costs):
        spent += cost
        rounds[math.ceil(spent / rate) - 1].append(n)
    return rounds


def heat_price(network: Network, horizon: float) -> Array:
    """V when every later matching acts like heat flowing for a while: Σ_k exp(−2k·horizon·L/d̄).

    d̄ is the mean degree. Directions that the graph smooths slowly are worth more.
    """
    m, (i, j) = network.num_workers, network.links.T
    if horizon == 0:
        return cycles.centering(m)
    L = np.zeros((m, m))
    np.add.at(L, (np.concatenate([i, j]), np.concatenate([i, j])), 1.0)
    L[i, j] -= 1
    L[j, i] -= 1
    values, vectors = np.linalg.eigh(L)
    flow = 2 * horizon * values[1:] / (2 * len(i) / m)
    price: Array = (vectors[:, 1:] / -np.expm1(-flow)) @ vectors[:, 1:].T
    return price


def greedy_run(
    network: Network, *, weight: float, price: Array, start: Array, count: int
) -> tuple[list[Indices], list[Fraction], float]:
    """Spend time greedily as it accrues, from a covariance, for at least `count` matchings.

    With equal links the next matching is the heaviest one; with link times, the one with the
    best gain a second among the heaviest of all links up to each time.

    Returns:
        The matchings, their times, and the mean of tr(X)/m over the iterations of the run.
    """
    m, (i, j) = network.num_workers, network.links.T
    noise = cycles.centering(m)
    D = price[i] - price[j]
    own = D[np.arange(len(i)), i] - D[np.arange(len(i)), j]
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
    for limit in network.limits:
        allowed = (
            gains if limit == network.limits[-1] else gains * (network.seconds <= float(limit))
        )
        chosen = heaviest_matching(network.links, allowed, network.num_workers)
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
    for want in wanted:
        options = range(min(want, len(costs)), min(math.ceil(1.25 * want), len(costs)) + 1)
        sizes.append(min(options, key=lambda n: (round(_waste(costs[-n:], rate), 6), n)))
    return sorted(set(sizes))


def _waste(costs: Sequence[Fraction], rate: Fraction) -> float:
    total = sum(costs, start=Fraction(0))
    return float(math.ceil(total / rate) * rate / total) - 1


# -- descent ------------------------------------------------------------------------------------


def refined(candidate: Candidate, sweeps: int = _SWEEPS) -> Candidate:
    """Descend: replace matchings one at a time by better ones, and adjust the weight; repeat."""
    best = with_best_weight(candidate)
    for _ in range(sweeps):
        swept = with_best_weight(_swept(best))
        if not swept.error < best.error * (1 - 1e-4):
            return swept if swept.error < best.error else best
        best = swept
    return best


def kicked(candidate: Candidate, kicks: int, sweeps: int, seed: int = 0) -> Candidate:
    """Leave local minima: replace a stretch of matchings by random ones and descend again."""
    network, rng = candidate.network, np.random.default_rng(seed)
    length = len(candidate.matchings)
    best = candidate
    for _ in range(kicks):
        matchings, start = list(best.matchings), int(rng.integers(length))
        for n in range(start, start + max(2, length // 6)):
            limit = float(best.costs[n % length])
            weights = np.where(network.seconds <= limit, 0.5 + rng.random(len(network.links)), 0.0)
            matchings[n % length] = heaviest_matching(network.links, weights, network.num_workers)
        costs = tuple(network.cost(chosen) for chosen in matchings)
        other = replace(best, matchings=tuple(matchings), costs=costs).scored()
        if math.isfinite(other.error):
            other = refined(other, sweeps)
        if other.error < best.error * (1 - 1e-9):
            best = other
    return best


def with_best_weight(candidate: Candidate) -> Candidate:
    """The same cycle with the weight that minimises its error."""
    from scipy.optimize import minimize_scalar

    def error(weight: float) -> float:
        found = replace(candidate, weight=float(weight)).scored().error
        return found if math.isfinite(found) else 1e300

    current = candidate.scored()
    low, high = current.weight - 0.12, min(current.weight + 0.12, _HEAVIEST_WEIGHT)
    found = minimize_scalar(error, bounds=(low, high), method="bounded", options={"xatol": 2e-3})
    # Three digits are all that matters, and read better in a plan.
    other = replace(current, weight=round(float(found.x), 3)).scored()
    return other if other.error < current.error else current


def _swept(candidate: Candidate) -> Candidate:
    """One pass over the cycle, each matching replaced by the best one found at its price."""
    network, m, w = candidate.network, candidate.network.num_workers, candidate.weight
    rounds, noise = candidate.rounds(), cycles.centering(m)
    state = cycles.steady_state(rounds, m, w)
    V = cycles.steady_adjoint(rounds, m, w)
    if state is None or V is None:
        return candidate
    # prices[n]: what a covariance costs right after matching n.
    prices: list[Array] = []
    for round_ in reversed(rounds):
        V = V + noise
        for ends in reversed(round_):
            prices.append(V.copy())
            cycles.conjugate(V, ends, w)
    prices.reverse()
    X = state.covariance.copy()
    matchings = list(candidate.matchings)
    for numbers in candidate.numbers():
        X += noise
        for n in numbers:
            allowed = network.seconds <= float(candidate.costs[n])
            matchings[n] = _improved(network, X, prices[n], w, matchings[n], allowed)
            cycles.conjugate(X, network.ends(matchings[n]), w)
    costs = tuple(network.cost(chosen) for chosen in matchings)
    return replace(candidate, matchings=tuple(matchings), costs=costs)


def _improved(
    network: Network, X: Array, V: Array, w: float, current: Indices, allowed: npt.NDArray[np.bool_]
) -> Indices:
    """A matching that lowers ⟨V, A X A⟩, from two starts: the current and the heaviest one."""
    i, j = network.links.T
    edge = np.arange(len(i))
    BX, BV = X[i] - X[j], V[i] - V[j]
    linear = 2 * w * np.einsum("ek,ek->e", BX, BV)
    linear[~allowed] = -np.inf
    diagonal = w * w * (BX[edge, i] - BX[edge, j]) * (BV[edge, i] - BV[edge, j])

    def coupling(chosen: Indices) -> Array:
        """w² (b_eᵀX b_f)(b_eᵀV b_f) for all links e and chosen links f."""
        f, g = network.ends(chosen)
        product: Array = w * w * (BX[:, f] - BX[:, g]) * (BV[:, f] - BV[:, g])
        return product

    def cost(chosen: Indices, Q: Array) -> float:
        return float(Q[chosen].sum() - linear[chosen].sum())

    best, best_cost = current, cost(current, coupling(current))
    floor = 1e-9 * abs(best_cost)
    worth = np.where(allowed, linear - diagonal, 0.0)
    for start in (current, heaviest_matching(network.links, worth, network.num_workers)):
        if not len(start):
            continue
        chosen, value = start, cost(start, coupling(start))
        for _ in range(4):
            # Links are worth what they gain next to the links chosen now.
            Q = coupling(chosen)
            inside = np.isin(edge, chosen)
            worth = linear - diagonal - 2 * (Q.sum(axis=1) - np.where(inside, diagonal, 0.0))
            other = heaviest_matching(network.links, np.where(allowed, worth, 0.0), len(X))
            if not len(other):
                break
            other_value = cost(other, coupling(other))
            if other_value >= value:
                break
            chosen, value = other, other_value
        chosen, value = _swapped(network, chosen, value, linear, diagonal, coupling, floor)
        if value < best_cost - floor and len(chosen):
            best, best_cost = chosen, value
    return best


def _swapped(
    network: Network,
    chosen: Indices,
    value: float,
    linear: Array,
    diagonal: Array,
    coupling: Callable[[Indices], Array],
    floor: float,
) -> tuple[Indices, float]:
    """Descend by single moves: add a link, dropping those in its way, or drop one."""
    i, j = network.links.T
    for _ in range(2 * network.num_workers):
        Q = coupling(chosen)
        size = len(chosen)
        # Position of the chosen link at each worker; `size` is a ghost link that costs nothing.
        owner = np.full(network.num_workers, size)
        owner[network.links[chosen].ravel()] = np.repeat(np.arange(size), 2)
        Q = np.hstack([Q, np.zeros((len(Q), 1))])
        within = np.vstack([Q[chosen], np.zeros(size + 1)])
        drop = np.zeros(size + 1)
        drop[:size] = linear[chosen] - 2 * within[:size].sum(axis=1) + diagonal[chosen]
        a, b = owner[i], owner[j]
        edge = np.arange(len(i))
        change = diagonal - linear + 2 * (Q.sum(axis=1) - Q[edge, a] - Q[edge, b])
        change += drop[a] + drop[b] + 2 * within[a, b]
        change[chosen] = np.inf
        add, remove = int(np.argmin(change)), int(np.argmin(drop[:size]))
        if min(change[add], drop[remove]) >= -floor:
            break
        if change[add] <= drop[remove]:
            stay = np.delete(chosen, [k for k in {int(a[add]), int(b[add])} if k < size])
            chosen = np.sort(np.append(stay, add))
            value += float(change[add])
        else:
            chosen = np.delete(chosen, remove)
            value += float(drop[remove])
        if not len(chosen):
            break
    return chosen, value


# -- all together -------------------------------------------------------------------------------


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
    sweeps: int = _SWEEPS,
    kicks: int = 0,
    starts: Sequence[Sequence[Indices]] = (),
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
        starts: Cycles known beforehand, to be considered as well.
    """
    m, longest = network.num_workers, math.ceil(1.25 * max(lengths)) + 1
    candidates: list[Candidate] = []
    shorts: list[Candidate] = []
    endless = math.inf
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
                    ).scored()
                    if best is None or candidate.error < best.error:
                        best = candidate
                    if size <= _SHORT and math.isfinite(candidate.error):
                        shorts.append(candidate)
                assert best is not None
                state = None
                if leg == 0 and math.isfinite(best.error):
                    # Continue from where the cycle settles: from X = 0 that could take long.
                    state = cycles.steady_state(best.rounds(), m, weight)
                start = start if state is None else state.covariance
            assert best is not None
            candidates.append(best)
            if math.isfinite(best.error):
                endless = min(endless, error)
    candidates += [
        Candidate(
            network=network,
            matchings=tuple(known),
            costs=tuple(network.cost(chosen) for chosen in known),
            weight=0.5,
        ).scored()
        for known in starts
    ]
    candidates.sort(key=lambda candidate: candidate.error)
    candidates = _distinct(candidates)
    finalists = [refined(candidate, sweeps) for candidate in candidates[:refine]]
    finalists += candidates[refine : refine + 1]
    # In a short cycle a kick is felt everywhere, and descending again is quick.
    if kicks:
        shorts.sort(key=lambda candidate: candidate.error)
        finalists += [kicked(refined(c, sweeps), kicks, sweeps) for c in _distinct(shorts)[:2]]
    return Found(best=min(finalists, key=lambda candidate: candidate.error), endless=endless)


def _distinct(candidates: list[Candidate]) -> list[Candidate]:
    """Without repetitions of nearly the same cycle: equal errors mean equal cycles."""
    kept: list[Candidate] = []
    for candidate in candidates:
        if not kept or candidate.error > kept[-1].error * (1 + 1e-6):
            kept.append(candidate)
    return kept
