"""Heavy matchings and permutations, against searches through all of them."""

from __future__ import annotations

from fractions import Fraction
from itertools import permutations

import networkx as nx
import numpy as np
import pytest
from tests.strategies.greedy.networks import network

from matcha import families
from matcha.matchings import is_matching
from matcha.strategies.greedy.max_weight import (
    _sparse_permutation,
    approximate_max_weight_matching,
    max_weight_matching,
    max_weight_permutation,
)


@pytest.mark.parametrize("seed", range(3))
def test_no_matching_is_heavier(seed):
    topology = families.paper("er8")
    weights = np.random.default_rng(seed).normal(size=len(topology.links))
    chosen = max_weight_matching(topology.link_array, weights, 8)
    assert is_matching([topology.links[e] for e in chosen])
    graph = nx.Graph()
    graph.add_weighted_edges_from(
        (i, j, w) for (i, j), w in zip(topology.links, weights, strict=True)
    )
    best = sum(graph.edges[pair]["weight"] for pair in nx.max_weight_matching(graph))
    assert weights[chosen].sum() == pytest.approx(best)


def test_the_seed_decides_between_equals():
    links, weights = families.complete(8).link_array, np.ones(28)
    found = {
        tuple(max_weight_matching(links, weights, 8, seed=seed).tolist()) for seed in (0, 1, 2, 0)
    }
    assert len(found) == 3
    assert all(len(chosen) == 4 for chosen in found)


def test_nearly_heaviest_is_a_matching_and_nearly_heaviest():
    rng = np.random.default_rng(0)
    for name in ("geometric:60:0.25:1", "erdos-renyi:60:0.1:2", "torus:8x8"):
        topology = families.parse(name)
        for spread in (0.05, 1.0):
            weights = 1 + spread * rng.standard_exponential(len(topology.links))
            exact = max_weight_matching(topology.link_array, weights, topology.num_workers)
            quick = approximate_max_weight_matching(
                topology.link_array, weights, topology.num_workers
            )
            assert is_matching([topology.links[e] for e in quick])
            assert weights[quick].sum() >= 0.93 * weights[exact].sum()
    nothing = approximate_max_weight_matching(topology.link_array, np.zeros(len(weights)), 64)
    assert len(nothing) == 0


def test_the_max_weight_permutation_is_the_best_of_all():
    rng = np.random.default_rng(3)
    net = network(families.paper("er8"), Fraction(1), directed=True)
    for _ in range(5):
        weights = rng.normal(size=len(net.links))
        worth = {(int(r), int(s)): w for (r, s), w in zip(net.links, weights, strict=True)}
        chosen = max_weight_permutation(net.links, weights, 8)
        assert sorted(net.links[chosen, 0]) == sorted(net.links[chosen, 1])
        allowed = [[s for s in range(8) if s == r or (r, s) in worth] for r in range(8)]
        best = max(
            sum(worth.get((r, s), 0.0) for r, s in enumerate(sigma))
            for sigma in permutations(range(8))
            if all(s in allowed[r] for r, s in enumerate(sigma))
        )
        assert weights[chosen].sum() == pytest.approx(best)


def test_few_links_among_many_workers_have_the_same_max_weight_permutation():
    rng = np.random.default_rng(4)
    net = network(families.parse("geometric:40:0.3:1"), Fraction(1), directed=True)
    for shift in (0.0, 0.7):
        weights = rng.random(len(net.links)) - shift
        dense = max_weight_permutation(net.links, weights, 40)
        sparse = _sparse_permutation(net.links, weights, 40)
        assert sorted(net.links[sparse, 0]) == sorted(net.links[sparse, 1])
        assert weights[sparse].sum() == pytest.approx(weights[dense].sum())
