"""Descent: every step lowers the exact error, and what it ends with are matchings."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from tests.strategies.greedy.networks import network

from matcha import families
from matcha.matchings import is_matching
from matcha.strategies.greedy.candidates import Candidate
from matcha.strategies.greedy.descent import (
    _error_and_gradient,
    _groups,
    descend,
    kick,
    optimize_weights,
    with_best_weight,
)
from matcha.strategies.greedy.max_weight import max_weight_matching


@pytest.mark.parametrize("weight", [0.5, 0.62])
def test_refinement_descends_and_keeps_matchings(weight):
    topology = families.paper("er16")
    net = network(topology, Fraction(8, 10))
    rng = np.random.default_rng(3)
    chosen = [max_weight_matching(net.links, rng.random(len(net.links)), 16) for _ in range(12)]
    start = Candidate(
        network=net, matchings=tuple(chosen), costs=(Fraction(1),) * 12, weight=weight
    ).with_error()
    better = descend(start, 12)
    assert better.error < 0.9 * start.error
    assert better.error == pytest.approx(better.with_error().error)
    for matching in better.matchings:
        assert is_matching([topology.links[e] for e in matching])


def path_cycle(weight):
    net = network(families.path(4), Fraction(1))
    chosen = (np.array([0, 2]), np.array([1]))
    return Candidate(
        network=net, matchings=chosen, costs=(Fraction(1),) * 2, weight=weight
    ).with_error()


def test_the_best_weight_is_better_than_those_beside_it():
    best = with_best_weight(path_cycle(0.5))
    assert best.error < path_cycle(0.5).error
    for step in (-0.02, 0.02):
        assert path_cycle(best.weight + step).error > best.error


def test_kicks_leave_a_local_minimum_and_never_make_it_worse():
    net = network(families.paper("er8"), Fraction(1))
    rng = np.random.default_rng(0)
    chosen = tuple(net.max_weight(rng.random(len(net.links))) for _ in range(6))
    start = Candidate(network=net, matchings=chosen, costs=(Fraction(1),) * 6, weight=0.5)
    local = descend(start, 2)
    better = kick(local, 2, 1)
    assert better.error < local.error
    assert better.error == pytest.approx(better.with_error().error)


# -- a weight for every link -----------------------------------------------------------------------


def some_cycle(net, length=8, seed=0):
    rng = np.random.default_rng(seed)
    matchings = tuple(net.max_weight(rng.random(len(net.links))) for _ in range(length))
    return Candidate(
        network=net, matchings=matchings, costs=(Fraction(1),) * length, weight=0.55
    ).with_error()


@pytest.mark.parametrize("directed", [False, True])
def test_the_gradient_is_the_slope_and_descent_pays(directed):
    start = some_cycle(network(families.paper("er8"), Fraction(1, 2), directed=directed))
    groups = _groups(start)
    sizes = np.cumsum([len(chosen) for chosen in start.matchings])[:-1]
    rng = np.random.default_rng(1)
    values = rng.uniform(0.4, 0.7, groups.max() + 1)

    def error(values):
        weights = tuple(np.split(values[groups], sizes))
        return _error_and_gradient(replace(start, weights=weights))

    _, slopes = error(values)
    slopes = np.bincount(groups, weights=slopes)
    for k in rng.choice(len(values), 5, replace=False):
        step = np.zeros_like(values)
        step[k] = 1e-6
        slope = (error(values + step)[0] - error(values - step)[0]) / 2e-6
        assert slope == pytest.approx(slopes[k], rel=1e-4, abs=1e-7)
    better = optimize_weights(start)
    assert better.error < 0.99 * start.error
    assert better.error == pytest.approx(better.with_error().error)
