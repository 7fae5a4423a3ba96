"""Supports: no product of matchings is shorter than what the search through all of them says."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest
from benchmarks.parts.supports import _gains, _maximal_matchings, searched_lengths, sharpen
from scipy.optimize import minimize

from matcha import families, theory


def shortest(topology, count, rng):
    """The shortest product of some matchings that a search over them and their weights finds."""
    m = topology.num_workers
    best = float(m)
    for chosen in itertools.product(_maximal_matchings(topology), repeat=count):
        pairs = [[(i, j) for i, j in enumerate(p) if i < j] for p in chosen]
        sizes = [len(some) for some in pairs]

        def length(weights, pairs=pairs, sizes=sizes):
            product = np.eye(m)
            parts = np.split(weights, np.cumsum(sizes)[:-1])
            for some, own in zip(pairs, parts, strict=True):
                A = np.eye(m)
                for (i, j), w in zip(some, own, strict=True):
                    A[i, i] = A[j, j] = 1 - w
                    A[i, j] = A[j, i] = w
                product = A @ product
            return float(np.square(product).sum())

        found = minimize(length, np.full(sum(sizes), 0.5), bounds=[(0, 1)] * sum(sizes))
        best = min(best, float(found.fun), length(rng.random(sum(sizes))))
    return best / m


@pytest.mark.parametrize(("name", "count"), [("path:4", 3), ("star:4", 3), ("ring:5", 2)])
def test_no_product_of_matchings_is_shorter(name, count):
    topology = families.parse(name)
    lengths = searched_lengths(topology, seconds=60.0)
    for a in range(1, count + 1):
        found = shortest(topology, a, np.random.default_rng(a))
        assert lengths[a] <= found * (1 + 1e-6)
        assert lengths[a] >= 0.8 * found  # and not far below


def test_what_a_pair_keeps_is_the_least_of_two_rows():
    rng = np.random.default_rng(0)
    for _ in range(20):
        states = rng.random((1, 2, 6)) < 0.5
        states[0, 0, 0] = states[0, 1, 1] = True
        alone, gains = _gains(states, np.array([[0, 1]]))

        def kept(values, mask=states[0]):
            rows = np.where(mask, np.abs(values.reshape(2, 6)) + 1e-12, 0.0)
            rows /= rows.sum(axis=1, keepdims=True)
            return 0.5 * float(np.square(rows.sum(axis=0)).sum())

        starts = (rng.random(12) for _ in range(3))
        least = min(float(minimize(kept, start, tol=1e-10).fun) for start in starts)
        assert float(alone[0] - gains[0, 0]) == pytest.approx(least, abs=1e-3)


def test_every_maximal_matching_is_found_once():
    found = _maximal_matchings(families.path(4))
    assert sorted(map(tuple, found.tolist())) == [(0, 2, 1, 3), (1, 0, 3, 2)]
    assert len(_maximal_matchings(families.complete(6))) == 15
    assert _maximal_matchings(families.complete(14)) is None


def test_the_bound_is_sharper_and_still_below_every_schedule():
    topology = families.paper("er8")
    quick = theory.graph_bound(topology, 1.2)
    searched = searched_lengths(topology, seconds=60.0)
    sharp = theory.graph_bound(topology, 1.2, sharpen=partial(sharpen, searched=searched))
    assert sharp > 1.2 * quick
    import matcha

    plan = matcha.plan(topology, 1.2 / 5, "greedy")
    assert sharp <= plan.consensus_error
