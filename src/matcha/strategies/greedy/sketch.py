"""The greedy search for thousands of workers: the covariance is never formed.

X is carried as s random copies of the noisy consensus itself: columns Z (m × s) that receive
fresh noise each iteration and the same mixing, so E[ZZᵀ]/s = X and a link's gain is an inner
product of differences of two rows. Matchings come from a linear-time approximation. The slowest
directions of the graph would take thousands of iterations to fill up; they are few and smooth, so
their steady state is solved for in the span of the lowest eigenvectors and Z starts from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from matcha._numerics import ProgressCallback, stepper
from matcha._numerics.spectra import (
    Array,
    Indices,
    is_narrow,
    laplacian,
    lowest_eigenpairs,
    start_vector,
)
from matcha.strategies.greedy.candidates import Candidate, Network
from matcha.strategies.greedy.max_weight import (
    approximate_max_weight_matching,
    max_weight_matching,
    max_weight_permutation,
)
from matcha.strategies.greedy.search import window_sizes
from matcha.theory import cycles

SCOUTS = 48
"""s while the weight is chosen."""
MOST_PROBES = 2048
"""s for the cycle itself, where time allows; gains are known to about √(2/s)."""

_NUMBERS = 500_000  # in Z: s falls with the number of workers, so that a run takes seconds
_LEAST_PROBES = 160
_EXACT_MATCHING_UP_TO = 1200  # workers; 0.1 s a matching there, and it grows with the cube
_SLOW = 48
_DEGREE = 4
_HORIZON = 4.0
_BLOCK = 1 << 16  # numbers that fit the cache
_COARSE = 7
_HEAVIEST_WEIGHT = 0.95
Singles: TypeAlias = npt.NDArray[np.float32]
Finder: TypeAlias = Callable[[Indices, Array, int], Indices]

_WEIGHTS = (0.5, 0.6, 0.7)
_PUSH_WEIGHTS = (0.4, 0.5, 0.6)
_MATCHINGS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketched:
    """The best cycle that the sketch found, and how it was found."""

    best: Candidate
    notes: tuple[str, ...]


def sketched_cycle(
    network: Network,
    *,
    seed: int = 0,
    probes: int | None = None,
    weights: Sequence[float] | None = None,
    progress: ProgressCallback | None = None,
) -> Sketched:
    """Choose a weight by short greedy runs on a small sketch, then run on a large one.

    Args:
        network: The links and their times.
        seed: Decides the random copies.
        probes: How many of them for the cycle itself; None: as many as memory allows.
        weights: Weights to try; the one used is where a parabola through their errors is lowest.
            None: some that suit matchings, or one-way messages.
        progress: Called with (done, total, "matchings of three runs") after each.
    """
    if probes is None:
        probes = max(_LEAST_PROBES, min(MOST_PROBES, _NUMBERS // network.num_workers))
    graph = _Graph.of(network)
    step = stepper(3 * _run_length(network), "matchings of three runs", progress)
    price = graph.heat_price(_HORIZON, seed)
    small = network.num_workers <= _EXACT_MATCHING_UP_TO
    # Gains are known to a few percent here: coarse weights lose nothing and take half as long.
    exact = partial(max_weight_matching, bits=_COARSE)
    find: Finder = exact if small else approximate_max_weight_matching
    quick: Finder = approximate_max_weight_matching
    if network.directed:
        # Of permutations the last bits are worth 7 % of the error, and three times the time.
        find, quick = max_weight_permutation, partial(max_weight_permutation, bits=_COARSE)
    if weights is None:
        weights = _PUSH_WEIGHTS if network.directed else _WEIGHTS
    weight = float(np.median(weights))
    # From nothing, then from where that settles: filling up from zero could take long.
    scout = _run(graph, price, weight, SCOUTS, seed, quick, None, step)
    scout = _run(graph, price, weight, SCOUTS, seed + 1, quick, scout, step)
    weight = _best_weight(graph, scout, weights, seed)
    found = _run(graph, price, weight, probes, seed, find, scout, step)
    around = [min(weight + step, _HEAVIEST_WEIGHT) for step in (-0.05, 0.0, 0.05)]
    found = replace(found, weight=_best_weight(graph, found, around, seed))
    return Sketched(
        best=measure_error(graph, found, probes, seed + 4),
        notes=(
            f"{network.num_workers} workers: searched on a sketch of {probes} random copies with "
            f"{_rounds(network, small)}; its consensus error is estimated by simulation.",
        ),
    )


def _rounds(network: Network, small: bool) -> str:
    if network.directed:
        return "the best permutations"
    return f"{'exact' if small else 'approximate'} matchings"


def _best_weight(graph: _Graph, candidate: Candidate, weights: Sequence[float], seed: int) -> float:
    """The weight with which a cycle's error is lowest: the same noise for each, and a parabola."""
    errors = [
        measure_error(graph, replace(candidate, weight=w), SCOUTS, seed + 4).error for w in weights
    ]
    return _lowest(weights, errors)


def _lowest(weights: Sequence[float], errors: Sequence[float]) -> float:
    """Where the parabola through the logarithms of the errors is lowest, within the weights."""
    if len(weights) < 3:
        return weights[int(np.argmin(errors))]
    a, b, _ = np.polyfit(weights, np.log(errors), 2)
    vertex = -b / (2 * a) if a > 0 else weights[int(np.argmin(errors))]
    return round(float(np.clip(vertex, min(weights), max(weights))), 3)


# -- the graph's smooth directions --------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Price:
    """V: what a covariance costs later, as a linear map, with b_eᵀV b_e for every link.

    Of a message, V_ii of its receiver.
    """

    apply: Callable[[Singles], Singles]
    own: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graph:
    """The network with its Laplacian and the lowest eigenpairs of it."""

    network: Network
    laplacian: Any
    values: Array
    vectors: Array
    top: float
    """An upper bound on the largest eigenvalue."""
    mean_degree: float

    @classmethod
    def of(cls, network: Network) -> _Graph:
        m, links = network.num_workers, network.links
        matrix = laplacian(links, m)
        values, vectors = lowest_eigenpairs(
            matrix,
            min(_SLOW, m // 4),
            narrow=is_narrow(links, m),
            start=start_vector(m, 0),
            tolerance=1e-3,
        )
        degrees = matrix.diagonal()
        i, j = links.T
        return cls(
            network=network,
            laplacian=matrix,
            values=values,
            vectors=vectors,
            top=float((degrees[i] + degrees[j]).max()),
            mean_degree=2 * len(links) / m,
        )

    def heat_price(self, horizon: float, seed: int) -> _Price:
        """`search.heat_price` as a map: a polynomial in L, exact on the lowest eigenvectors."""
        scale = 2 * horizon / self.mean_degree

        def exact(values: Array) -> Array:
            result: Array = 1 / -np.expm1(-scale * values)
            return result

        i, j = self.network.links.T
        total = np.zeros(len(i))
        rng = np.random.default_rng(seed)
        root = self._function(lambda values: np.sqrt(exact(values)))
        for _ in range(8):
            half = root(rng.standard_normal((self.network.num_workers, SCOUTS), dtype=np.float32))
            sides = half[i] if self.network.directed else half[i] - half[j]
            total += np.square(sides).sum(axis=1)
        return _Price(apply=self._function(exact), own=total / (8 * SCOUTS))

    def _function(self, f: Callable[[Array], Array]) -> Callable[[Singles], Singles]:
        """The map from x to f(L) x, without the mean, by Chebyshev polynomials."""
        from scipy.sparse import eye_array

        low, high = float(self.values[-1]), self.top
        middle, half = (high + low) / 2, max((high - low) / 2, 1e-9)
        nodes = np.cos(np.pi * (np.arange(_DEGREE + 1) + 0.5) / (_DEGREE + 1))
        series = np.polynomial.chebyshev.chebfit(nodes, f(middle + half * nodes), _DEGREE)
        correction = f(self.values) - np.polynomial.chebyshev.chebval(
            (self.values - middle) / half, series
        )
        # Single precision: gains are known to a few percent, and half the bytes take half as long.
        U = self.vectors.astype(np.float32)
        fix = (correction[:, None] * self.vectors.T).astype(np.float32)
        eye = eye_array(len(U), format="csr")
        # L shifted and scaled to [−1, 1], and twice that.
        twice = (2 / half * (self.laplacian - middle * eye)).astype(np.float32)
        c = [np.float32(value) for value in series]

        # Few columns at a time: what is worked on is memory that the processor has at hand.
        width = max(16, _NUMBERS // len(U))

        def apply(x: Singles) -> Singles:
            x = x - x.mean(axis=0)
            result: Singles = U @ (fix @ x)
            for start in range(0, x.shape[1], width):
                columns = slice(start, start + width)
                part = np.ascontiguousarray(x[:, columns])
                # Clenshaw's recurrence.
                now, before, scaled = c[-1] * part, np.zeros_like(part), np.empty_like(part)
                for value in c[-2:0:-1]:
                    new = twice @ now
                    new -= before
                    new += np.multiply(value, part, out=scaled)
                    now, before = new, now
                new = twice @ now
                new *= np.float32(0.5)
                new -= before
                new += np.multiply(c[0], part, out=scaled)
                result[:, columns] += new
            return result

        return apply

    def settle(self, candidate: Candidate, probes: int, seed: int) -> Array:
        """Copies that start near the steady state of a cycle: right in the slow directions."""
        turns, U = candidate.turns(), self.vectors
        F = U.T @ cycles.apply_cycle(turns, U, candidate.weight)
        # Noise enters at every iteration; half a cycle of decay is its average over a cycle.
        source = cycles.length(turns) * (np.eye(len(F)) + F @ F.T) / 2
        Y = cycles.lyapunov(F, source)
        if Y is None:
            return np.zeros((self.network.num_workers, probes))
        values, vectors = np.linalg.eigh((Y + Y.T) / 2)
        rng = np.random.default_rng(seed)
        draw = vectors * np.sqrt(np.maximum(values, 0)) @ rng.standard_normal((len(F), probes))
        return np.asarray(U @ draw)


# -- runs ---------------------------------------------------------------------------------------


def _run(
    graph: _Graph,
    price: _Price,
    weight: float,
    probes: int,
    seed: int,
    find: Finder,
    start: Candidate | None,
    step: Callable[[], None],
) -> Candidate:
    """The cycle that greed ends in, from where another cycle settles."""
    network = graph.network
    count = _cycle_length(network)
    Z = (
        np.zeros((network.num_workers, probes))
        if start is None
        else graph.settle(replace(start, weight=weight), probes, seed + 2)
    )
    matchings, costs = _greedy(graph, price, weight, Z, seed + 1, find, step)
    size = window_sizes(costs, network.rate, [count])[0]
    return covering(
        Candidate(
            network=network,
            matchings=tuple(matchings[-size:]),
            costs=tuple(costs[-size:]),
            weight=weight,
        )
    )


def _cycle_length(network: Network) -> int:
    """About how many matchings a cycle is to have."""
    cost = float(np.median(network.seconds))
    return max(_MATCHINGS, 2 * math.ceil(float(network.rate) / cost))


def _run_length(network: Network) -> int:
    """How many matchings a run finds, of which the last become the cycle."""
    return _cycle_length(network) + _cycle_length(network) // 4


def _greedy(
    graph: _Graph,
    price: _Price,
    weight: float,
    Z: Array,
    seed: int,
    find: Finder,
    step: Callable[[], None],
) -> tuple[list[Indices], list[Fraction]]:
    """`search.greedy_run` on copies Z."""
    network, rng = graph.network, np.random.default_rng(seed)
    count = _run_length(network)
    Y: Singles = Z.astype(np.float32)
    credit, cheapest = Fraction(0), network.limits[0]
    matchings: list[Indices] = []
    costs: list[Fraction] = []
    while len(matchings) < count:
        wait = max(1, math.ceil((cheapest - credit) / network.rate))
        _add_noise(Y, wait, rng)
        credit += wait * network.rate
        while credit >= cheapest:
            along, spread = _inner(Y, price.apply(Y), network)
            gains = 2 * weight * along - weight**2 * spread * price.own
            chosen = _best_by_time(network, gains, find)
            cost = network.cost(chosen)
            if cost > credit:
                break
            _mix(Y, network.ends(chosen), weight)
            credit -= cost
            matchings.append(chosen)
            costs.append(cost)
            if len(matchings) <= count:  # an iteration may bring a few more
                step()
    return matchings, costs


def _add_noise(Z: Singles, iterations: int, rng: np.random.Generator) -> None:
    """The gradient noise of some iterations, without its mean over workers.

    Signs: a sixth of the time of normal numbers, and fresh ones have no spread of their own.
    """
    bits = np.frombuffer(rng.bytes(-(-Z.size // 8)), dtype=np.uint8)
    coins = np.unpackbits(bits, count=Z.size).reshape(Z.shape)
    parts = _parts(len(Z), Z.shape[1])
    ones = np.ones(min(len(Z), parts[0].stop), dtype=np.float32)
    sums = [ones[: len(coins[part])] @ coins[part].astype(np.float32) for part in parts]
    mean = (np.sum(sums, axis=0, dtype=np.float64) / len(Z)).astype(np.float32)
    size = np.float32(2 * math.sqrt(iterations))
    for part in parts:
        noise = coins[part] - mean
        noise *= size
        Z[part] += noise


def _mix(Z: Singles, ends: cycles.Step, weight: float) -> None:
    """`cycles.mix`; a matching's links, which share no rows, in blocks that stay in the cache."""
    if ends.push:
        cycles.mix(Z, ends, weight)
        return
    for part in _parts(len(ends.i), Z.shape[1]):
        cycles.mix(Z, ends._replace(i=ends.i[part], j=ends.j[part]), weight)


def _parts(number: int, width: int) -> list[slice]:
    """Blocks of rows of so many numbers that fit the cache."""
    size = max(64, _BLOCK // width)
    return [slice(start, start + size) for start in range(0, number, size)]


def _inner(Z: Singles, PZ: Singles, network: Network) -> tuple[Array, Array]:
    """b_eᵀ Z (PZ)ᵀ b_e and b_eᵀ Z Zᵀ b_e for all links e, in blocks that stay in the cache.

    A message moves its receiver alone: of it, the first is b_eᵀ Z (PZ)ᵀ e_i.
    """
    i, j = network.links.T
    along, spread = np.empty(len(i)), np.empty(len(i))
    for part in _parts(len(i), Z.shape[1]):
        a, b = i[part], j[part]
        D = Z[a] - Z[b]
        along[part] = np.einsum("es,es->e", D, PZ[a] if network.directed else PZ[a] - PZ[b])
        spread[part] = np.einsum("es,es->e", D, D)
    return along, spread


def _best_by_time(network: Network, gains: Array, find: Finder) -> Indices:
    best, best_rate = None, 0.0
    for limit in network.limits:
        allowed = np.where(network.seconds <= float(limit), gains, 0.0)
        chosen = find(network.links, allowed, network.num_workers)
        if len(chosen):
            rate = float(gains[chosen].sum()) / float(network.cost(chosen))
            if rate > best_rate:
                best, best_rate = chosen, rate
    if best is None:
        best = find(network.links, 1 / network.seconds, network.num_workers)
    return best


def measure_error(graph: _Graph, candidate: Candidate, probes: int, seed: int) -> Candidate:
    """The candidate with its error, estimated on copies that had no part in the choice."""
    turns, m = candidate.turns(), candidate.network.num_workers
    rng = np.random.default_rng(seed)
    Z: Singles = graph.settle(candidate, probes, seed).astype(np.float32)
    total, counted = 0.0, 0
    for turn in range(5):
        for wait, steps in turns:
            if turn >= 3:
                # Iterations in which no worker talks: noise piles up at a known rate.
                size = float(np.vdot(Z, Z))
                total += (wait - 1) * size + probes * (m - 1) * wait * (wait - 1) / 2
            _add_noise(Z, wait, rng)
            for ends in steps:
                _mix(Z, ends, candidate.weight)
            if turn >= 3:
                total += float(np.vdot(Z, Z))
        counted += cycles.length(turns) if turn >= 3 else 0
    return replace(candidate, error=total / (counted * probes * m))


def covering(candidate: Candidate) -> Candidate:
    """The cycle with matchings of links not used so far, until it connects all workers."""
    network = candidate.network
    matchings = list(candidate.matchings)
    while not cycles.connects([(1, [network.ends(chosen) for chosen in matchings])], _m(network)):
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import connected_components

        used = network.links[np.concatenate(matchings)]
        graph = coo_array((np.ones(len(used)), used.T), shape=(_m(network), _m(network)))
        part = connected_components(graph, directed=False)[1]
        across = part[network.links[:, 0]] != part[network.links[:, 1]]
        gains = np.where(across, 1 / network.seconds, 0.0)
        matchings.append(
            # Who sends across must hear back, by whatever way: the rest of a circle costs little.
            network.max_weight(np.where(across, gains, -1e-6 * gains.max()))
            if network.directed
            else approximate_max_weight_matching(network.links, gains, _m(network))
        )
    costs = tuple(network.cost(chosen) for chosen in matchings)
    return replace(candidate, matchings=tuple(matchings), costs=costs)


def _m(network: Network) -> int:
    return network.num_workers
