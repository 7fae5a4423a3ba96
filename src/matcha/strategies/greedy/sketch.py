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
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeAlias

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
from matcha.strategies.greedy.candidates import Candidate, SearchNetwork
from matcha.strategies.greedy.max_weight import (
    approximate_max_weight_matching,
    max_weight_matching,
    max_weight_permutation,
)
from matcha.strategies.greedy.search import greedy_run, window_sizes
from matcha.theory import cycles
from matcha.topology import parts_of

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
_WEIGHTS, _PUSH_WEIGHTS = (0.5, 0.6, 0.7), (0.4, 0.5, 0.6)
_MATCHINGS = 48
Singles: TypeAlias = npt.NDArray[np.float32]
Finder: TypeAlias = Callable[[Indices, Array, int], Indices]


def sketched_cycle(
    network: SearchNetwork,
    *,
    seed: int = 0,
    probes: int | None = None,
    progress: ProgressCallback | None = None,
) -> tuple[Candidate, str]:
    """The best cycle found, and a note on how: a weight by runs on few copies, then one on many.

    The seed decides the random copies; there are as many as memory allows, or `probes`.
    """
    if probes is None:
        probes = max(_LEAST_PROBES, min(MOST_PROBES, _NUMBERS // network.num_workers))
    small = network.num_workers <= _EXACT_MATCHING_UP_TO
    find: Finder
    quick: Finder
    if network.directed:
        # Of permutations the last bits are worth 7 % of the error, and three times the time.
        find, quick = max_weight_permutation, partial(max_weight_permutation, bits=_COARSE)
        weights, rounds = _PUSH_WEIGHTS, "the best permutations"
    else:
        # Gains are known to a few percent here: coarse weights lose nothing and take half as long.
        quick = approximate_max_weight_matching
        find = partial(max_weight_matching, bits=_COARSE) if small else quick
        weights, rounds = _WEIGHTS, f"{'exact' if small else 'approximate'} matchings"
    graph = _Graph(network)
    price = graph.heat_price(_HORIZON, seed)
    cost = float(np.median(network.seconds))
    length = max(_MATCHINGS, 2 * math.ceil(float(network.rate) / cost))
    count = length + length // 4
    step = stepper(3 * count, "matchings of three runs", progress)

    def run(
        weight: float, probes: int, seed: int, find: Finder, start: Candidate | None
    ) -> Candidate:
        """The cycle that greed ends in, from where another cycle settles."""
        Z = np.zeros((network.num_workers, probes))
        if start is not None:
            Z = graph.settle(replace(start, weight=weight), probes, seed + 2)
        copies = _Copies(network, weight, price, Z, np.random.default_rng(seed + 1), find)
        matchings, costs = greedy_run(network, copies, count, step)
        (size,) = window_sizes(costs, network.rate, [length])
        chosen, times = tuple(matchings[-size:]), tuple(costs[-size:])
        return covering(Candidate(network=network, matchings=chosen, costs=times, weight=weight))

    # From nothing, then from where that settles: filling up from zero could take long.
    scout = run(weights[1], SCOUTS, seed, quick, None)
    scout = run(weights[1], SCOUTS, seed + 1, quick, scout)
    found = run(_best_weight(graph, scout, weights, seed), probes, seed, find, scout)
    around = [min(found.weight + by, _HEAVIEST_WEIGHT) for by in (-0.05, 0.0, 0.05)]
    found = replace(found, weight=_best_weight(graph, found, around, seed))
    return measure_error(graph, found, probes, seed + 4), (
        f"{network.num_workers} workers: searched on a sketch of {probes} random copies with "
        f"{rounds}; its consensus error is estimated by simulation."
    )


def _best_weight(graph: _Graph, candidate: Candidate, weights: Sequence[float], seed: int) -> float:
    """The weight with which a cycle's error is lowest, by the same noise for each.

    A parabola through the logarithms of the errors is lowest there, within the weights.
    """
    errors = [
        measure_error(graph, replace(candidate, weight=w), SCOUTS, seed + 4).error for w in weights
    ]
    a, b, _ = np.polyfit(weights, np.log(errors), 2)
    vertex = -b / (2 * a) if a > 0 else weights[int(np.argmin(errors))]
    return round(float(np.clip(vertex, min(weights), max(weights))), 3)


class _Price(NamedTuple):
    """V: what a covariance costs later."""

    apply: Callable[[Singles], Singles]
    own: Array
    """b_eᵀV b_e for every link; of a message, V_ii of its receiver."""


class _Graph:
    """The network with its Laplacian and the lowest eigenpairs of it: its smooth directions."""

    def __init__(self, network: SearchNetwork) -> None:
        m, links = network.num_workers, network.links
        self.network, self.laplacian = network, laplacian(links, m)
        self.values, self.vectors = lowest_eigenpairs(
            self.laplacian,
            min(_SLOW, m // 4),
            narrow=is_narrow(links, m),
            start=start_vector(m, 0),
            tolerance=1e-3,
        )

    def heat_price(self, horizon: float, seed: int) -> _Price:
        """`search.heat_price` as a map: a polynomial in L, exact on the lowest eigenvectors."""
        m, (i, j) = self.network.num_workers, self.network.links.T
        scale = 2 * horizon / (2 * len(i) / m)

        def exact(values: Array) -> Array:
            result: Array = 1 / -np.expm1(-scale * values)
            return result

        total = np.zeros(len(i))
        rng = np.random.default_rng(seed)
        root = self._function(lambda values: np.sqrt(exact(values)))
        for _ in range(8):
            half = root(rng.standard_normal((m, SCOUTS), dtype=np.float32))
            sides = half[i] if self.network.directed else half[i] - half[j]
            total += np.square(sides).sum(axis=1)
        return _Price(self._function(exact), total / (8 * SCOUTS))

    def _function(self, f: Callable[[Array], Array]) -> Callable[[Singles], Singles]:
        """The map from x to f(L) x, without the mean, by Chebyshev polynomials."""
        from scipy.sparse import eye_array

        degrees, (i, j) = self.laplacian.diagonal(), self.network.links.T
        # No eigenvalue is larger than the degrees of a link's ends together.
        low, high = float(self.values[-1]), float((degrees[i] + degrees[j]).max())
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
                for k in reversed(range(_DEGREE)):
                    new = twice @ now
                    if k == 0:
                        new *= np.float32(0.5)
                    new -= before
                    new += np.multiply(c[k], part, out=scaled)
                    now, before = new, now
                result[:, columns] += now
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


class _Copies:
    """Copies Z of the noisy consensus, for `search.greedy_run`."""

    def __init__(
        self,
        network: SearchNetwork,
        weight: float,
        price: _Price,
        Z: Array,
        rng: np.random.Generator,
        find: Finder,
    ) -> None:
        self._network, self._weight, self._price, self._rng = network, weight, price, rng
        self._Z: Singles = Z.astype(np.float32)
        self._find = find

    def wait(self, iterations: int) -> None:
        _add_noise(self._Z, iterations, self._rng)

    def choose(self) -> Indices:
        w = self._weight
        along, spread = _inner(self._Z, self._price.apply(self._Z), self._network)
        gains = 2 * w * along - w**2 * spread * self._price.own
        chosen = self._network.best_by_time(gains, self._heaviest)
        return self._heaviest(1 / self._network.seconds) if chosen is None else chosen

    def _heaviest(self, weights: Array) -> Indices:
        return self._find(self._network.links, weights, self._network.num_workers)

    def exchange(self, chosen: Indices) -> None:
        _mix(self._Z, self._network.ends(chosen), self._weight)


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


def _inner(Z: Singles, PZ: Singles, network: SearchNetwork) -> tuple[Array, Array]:
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
    network, matchings = candidate.network, list(candidate.matchings)
    links, m = network.links, network.num_workers
    while (part := parts_of(links[np.concatenate(matchings)], m)).any():
        across = part[links[:, 0]] != part[links[:, 1]]
        gains = np.where(across, 1 / network.seconds, 0.0)
        matchings.append(
            # Who sends across must hear back, by whatever way: the rest of a circle costs little.
            network.max_weight(np.where(across, gains, -1e-6 * gains.max()))
            if network.directed
            else approximate_max_weight_matching(links, gains, m)
        )
    return candidate.with_matchings(matchings)
