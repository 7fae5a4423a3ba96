"""Cycles known beforehand, from which the search may start where the topology has their links."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

import numpy as np

from matcha.strategies.finite_time import exponential_hops, hypercube_matchings, messages
from matcha.strategies.greedy.candidates import Candidate, Network
from matcha.strategies.greedy.circulant import best_hops, possible_hops
from matcha.strategies.greedy.max_weight import Indices
from matcha.topology import Matching, Topology

_MOST_TURNS = 64


def initial_cycles(topology: Topology, network: Network) -> list[Candidate]:
    """A hypercube's, and where messages go one way those of hops."""
    sequences: list[Sequence[Matching]] = []
    cube = hypercube_matchings(topology.num_workers)
    if not network.directed:
        sequences.append(cube)
    else:
        sequences.append([both_ways(matching) for matching in cube])
        sequences += _hops(topology, network)
    found = [_candidate(network, sequence) for sequence in sequences if sequence]
    return [candidate for candidate in found if candidate is not None]


def both_ways(matching: Matching) -> Matching:
    """A matching's exchanges as messages (sender, receiver)."""
    return tuple(sorted([*matching, *((j, i) for i, j in matching)]))


def as_circles(candidate: Candidate, network: Network) -> Candidate:
    """A cycle of matchings as one of messages: each exchange is a circle of two."""
    pairs = [
        [tuple(link) for link in candidate.network.links[chosen].tolist()]
        for chosen in candidate.matchings
    ]
    position = _positions(network)
    matchings, weights = [], []
    for links, shares in zip(pairs, candidate.weights or (None,) * len(pairs), strict=True):
        arrows = [position[i, j] for i, j in links] + [position[j, i] for i, j in links]
        order = np.argsort(arrows)
        matchings.append(np.array(arrows, dtype=np.int64)[order])
        weights.append(None if shares is None else np.concatenate([shares, shares])[order])
    return Candidate(
        network=network,
        matchings=tuple(matchings),
        costs=candidate.costs,
        weight=candidate.weight,
        weights=None if candidate.weights is None else tuple(w for w in weights if w is not None),
    ).with_error()


def _hops(topology: Topology, network: Network) -> Iterable[Sequence[Matching]]:
    m, options = topology.num_workers, possible_hops(topology)
    if not options:
        return
    if set(exponential_hops(m)) <= set(options):
        yield [messages(m, hop) for hop in exponential_hops(m)]
    pace = network.rate / max(network.times)
    yield [messages(m, hop) for hop in best_hops(m, options, pace, seed=network.seed)]


def _positions(network: Network) -> dict[tuple[int, int], int]:
    """The position of each link; of a message (sender, receiver) where messages go one way."""
    ends = network.links[:, ::-1] if network.directed else network.links
    return {(i, j): e for e, (i, j) in enumerate(ends.tolist())}


def _candidate(network: Network, sequence: Sequence[Matching]) -> Candidate | None:
    position = _positions(network)
    if any(link not in position for matching in sequence for link in matching):
        return None
    once: list[Indices] = [
        np.array(sorted(position[link] for link in matching), dtype=np.int64)
        for matching in sequence
    ]
    # Repeated until the cycle's time is nearly whole iterations: little of the budget is lost, and
    # no iteration has few matchings.
    turn = sum((network.cost(chosen) for chosen in once), start=Fraction(0)) / network.rate
    turns = min(range(1, _MOST_TURNS + 1), key=lambda n: math.ceil(n * turn) / (n * turn))
    cycle = once * turns
    costs = tuple(network.cost(chosen) for chosen in cycle)
    found = Candidate(network=network, matchings=tuple(cycle), costs=costs, weight=0.5)
    return found.with_error()
