"""Networks and candidate cycles: what a matching gains, what it costs, where a cycle settles."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from benchmarks.parts.supports import doubling_bound
from tests.strategies.greedy.networks import network

from matcha import families
from matcha.strategies.finite_time import hypercube_matchings
from matcha.strategies.greedy.candidates import Candidate
from matcha.theory import cycles


@pytest.mark.parametrize("directed", [False, True])
def test_the_gain_formula_is_exact(directed):
    net = network(families.paper("er8"), Fraction(1), directed=directed)
    rng = np.random.default_rng(0)
    X, V = (a @ a.T for a in rng.normal(size=(2, 8, 8)))
    chosen = net.max_weight(rng.random(len(net.links)))
    after = X.copy()
    cycles.conjugate(after, net.ends(chosen), 0.6)
    i, j = net.links.T
    B, D = X[i] - X[j], net.sides(V)
    linear = np.einsum("ek,ek->e", B, D)[chosen].sum()
    crossed = ((B[:, i[chosen]] - B[:, j[chosen]]) * net.across(D, chosen))[chosen].sum()
    gain = 2 * 0.6 * linear - 0.36 * crossed
    assert gain == pytest.approx(np.sum(V * X) - np.sum(V * after))
    np.testing.assert_allclose(net.across(D), np.diagonal(net.across(D, np.arange(len(i)))))


def test_plain_greed_takes_half_of_each_squared_difference():
    net = network(families.paper("er8"), Fraction(1))
    rng = np.random.default_rng(0)
    a = rng.normal(size=(8, 8))
    X = a @ a.T
    chosen = net.max_weight(rng.random(len(net.links)))
    half = X.copy()
    cycles.conjugate(half, net.ends(chosen), 0.5)
    i, j = net.links[chosen].T
    assert np.trace(X) - np.trace(half) == pytest.approx(0.5 * np.square(a[i] - a[j]).sum())


def test_a_matching_takes_as_long_as_its_slowest_link_or_its_busiest_wire():
    net = network(families.path(4), Fraction(1))
    timed = replace(net, times=(Fraction(1), Fraction(2), Fraction(3)))
    assert timed.limits == (1, 2, 3)
    assert timed.cost(np.array([0, 2])) == 3
    assert timed.cost(np.array([0])) == 1
    # The first and the last link share a wire, on which each takes two seconds.
    shared = replace(timed, loads=np.array([[2.0, 0.0, 2.0]]))
    assert shared.cost(np.array([0, 2])) == 4
    assert shared.cost(np.array([1])) == 2
    # Each measurement has its own slowest link: (3 + 5) / 2.
    measured = replace(net, samples=np.array([[1.0, 9.0, 3.0], [5.0, 9.0, 3.0]]))
    assert measured.cost(np.array([0, 2])) == 4


def test_a_hypercubes_cycle_scores_the_bound_and_half_of_it_never_settles():
    cube = families.hypercube(3)
    net = network(cube, Fraction(1))
    matchings = tuple(
        np.array([cube.links.index(link) for link in matching])
        for matching in hypercube_matchings(8)
    )
    cycle = Candidate(network=net, matchings=matchings, costs=(Fraction(1),) * 3, weight=0.5)
    assert cycle.with_error().error == pytest.approx(doubling_bound(8, 1.0))
    part = replace(cycle, matchings=matchings[:2], costs=cycle.costs[:2])
    assert part.with_error().error == math.inf
