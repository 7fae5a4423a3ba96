"""Cycles known beforehand, from which the search may start where the topology has their links."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np

from matcha._numerics.spectra import Array, Indices
from matcha.strategies.finite_time import exponential_hops, hypercube_matchings, messages
from matcha.strategies.greedy.candidates import Candidate, SearchNetwork
from matcha.strategies.strategy import timeline
from matcha.topology import Matching, Topology

_MOST_TURNS = 64
_MOST_STEPS = 64
_TRIES = 4


def initial_cycles(topology: Topology, network: SearchNetwork) -> list[Candidate]:
    """A hypercube's, and where messages go one way those of hops."""
    sequences: list[Sequence[Matching]] = [hypercube_matchings(topology.num_workers)]
    if network.directed:
        sequences = [list(map(both_ways, sequences[0])), *_hops(topology, network)]
    position, found = _positions(network), []
    for sequence in sequences:
        if sequence and all(link in position for matching in sequence for link in matching):
            once = [np.array(sorted(position[link] for link in links)) for links in sequence]
            # Repeated until the cycle's time is nearly whole iterations: little of the budget is
            # lost, and no iteration has few matchings.
            turn = sum(map(network.cost, once), start=Fraction(0)) / network.rate
            turns = min(range(1, _MOST_TURNS + 1), key=lambda n: math.ceil(n * turn) / (n * turn))
            cycle = Candidate(network=network, matchings=(), costs=(), weight=0.5)
            found.append(cycle.with_matchings(once * turns).with_error())
    return found


def both_ways(matching: Matching) -> Matching:
    """A matching's exchanges as messages (sender, receiver)."""
    return tuple(sorted([*matching, *((j, i) for i, j in matching)]))


def as_circles(candidate: Candidate, network: SearchNetwork) -> Candidate:
    """A cycle of matchings as one of messages: each exchange is a circle of two."""
    position = _positions(network)
    matchings, weights = [], []
    for n, chosen in enumerate(candidate.matchings):
        links = candidate.network.links[chosen].tolist()
        arrows = [position[i, j] for i, j in links] + [position[j, i] for i, j in links]
        order = np.argsort(arrows)
        matchings.append(np.array(arrows, dtype=np.int64)[order])
        if candidate.weights is not None:
            weights.append(np.tile(candidate.weights[n], 2)[order])
    return replace(
        candidate, network=network, matchings=tuple(matchings), weights=tuple(weights) or None
    )


def _hops(topology: Topology, network: SearchNetwork) -> Iterable[Sequence[Matching]]:
    m, options = topology.num_workers, possible_hops(topology)
    if not options:
        return
    if set(exponential_hops(m)) <= set(options):
        yield [messages(m, hop) for hop in exponential_hops(m)]
    pace = network.rate / max(network.times)
    yield [messages(m, hop) for hop in best_hops(m, options, pace, seed=network.seed)]


def _positions(network: SearchNetwork) -> dict[tuple[int, int], int]:
    """The position of each link; of a message (sender, receiver) where messages go one way."""
    ends = network.links[:, ::-1] if network.directed else network.links
    return {(i, j): e for e, (i, j) in enumerate(ends.tolist())}


# -- hops: rounds in which each worker sends to the one a fixed number of places further on --------
# On a complete graph, or any graph that has the links, such rounds are circulant matrices: they
# share their eigenvectors, so a cycle's error is a sum of products of a few numbers, and hops can
# be tried by the thousand. The one-peer exponential graph hops 1, 2, 4, …; other hops are often
# better where the number of workers is no power of two.


def possible_hops(topology: Topology) -> tuple[int, ...]:
    """The hops h for which every worker i has a link to i + h."""
    m, arrows = topology.num_workers, set(topology.arrows)
    return tuple(h for h in range(1, m) if all((i, (i + h) % m) in arrows for i in range(m)))


def hops_error(hops: Indices, num_workers: int, rate: Fraction) -> Array:
    """The steady-state errors of cycles of hops (rows), at some rounds per iteration, weight ½."""
    length, m = hops.shape[1], num_workers
    count = length * min((Fraction(length) / rate).denominator, max(1, _MOST_STEPS // length))
    turns = timeline([Fraction(1)] * count, rate)
    k = np.arange(1, m)
    # |½ + ½ exp(2πi hk/m)|² for each hop h and each wave k.
    shrink = np.cos(np.pi * np.outer(np.arange(m), k) / m) ** 2
    steps = [shrink[hops[:, n % length]] for n in range(count)]

    def advance(state: Array) -> Array:
        """Run the waves through one cycle in place; the sum of their sizes over its iterations."""
        total = np.zeros(len(hops))
        for wait, numbers in turns:
            total += (wait - 1) * state.sum(axis=1) + (m - 1) * wait * (wait - 1) / 2
            state += wait
            for n in numbers:
                state *= steps[n]
            total += state.sum(axis=1)
        return total

    state, factor = np.zeros((len(hops), m - 1)), np.prod(steps, axis=0)
    advance(state)
    state /= np.maximum(1 - factor, 1e-300)
    error: Array = advance(state) / (sum(wait for wait, _ in turns) * m)
    return np.where(factor.max(axis=1) < 1 - 1e-12, error, np.inf)


def best_hops(
    num_workers: int, options: Sequence[int], rate: Fraction, *, seed: int = 0
) -> tuple[int, ...]:
    """A short cycle of hops with a low error: one hop at a time is replaced by the best one."""
    rng, m = np.random.default_rng(seed), num_workers
    choices = np.array(options, dtype=np.int64)
    least = max(1, math.ceil(math.log2(m)))
    best, best_error = np.array([choices[:1]]), math.inf
    for length in range(least, min(2 * least, 10) + 1):
        for attempt in range(_TRIES):
            start = np.array([2 ** (t % least) for t in range(length)])
            if attempt or not np.isin(start, choices).all():
                start = rng.choice(choices, length)
            hops, error = _descend(start, choices, m, rate)
            if error < best_error * (1 - 1e-9):
                best, best_error = hops, error
    return tuple(int(h) for h in best.ravel())


def _descend(hops: Indices, choices: Indices, m: int, rate: Fraction) -> tuple[Indices, float]:
    error = float(hops_error(hops[None], m, rate)[0])
    for _ in range(20):
        before = error
        for place in range(len(hops)):
            tried = np.repeat(hops[None], len(choices), axis=0)
            tried[:, place] = choices
            errors = hops_error(tried, m, rate)
            if errors.min() < error * (1 - 1e-9):
                hops, error = tried[int(errors.argmin())], float(errors.min())
        if error >= before * (1 - 1e-9):
            break
    return hops, error
