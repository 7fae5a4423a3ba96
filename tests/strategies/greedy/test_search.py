"""The exact search: its prices, its windows, and what repetition costs."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from benchmarks.parts.supports import doubling_bound
from tests.strategies.greedy.networks import network

import matcha
from matcha import families
from matcha.strategies import Greedy
from matcha.strategies.greedy import search
from matcha.strategies.greedy.initial_cycles import initial_cycles
from matcha.theory import cycles


def test_on_a_complete_graph_all_directions_have_one_price():
    net = network(families.complete(6), Fraction(1))
    # All eigenvalues but one are 6, the mean degree is 5: a geometric series.
    price = cycles.centering(6) / (1 - np.exp(-2 * 1.5 * 6 / 5))
    np.testing.assert_allclose(search.heat_price(net, 1.5), price, atol=1e-12)
    np.testing.assert_array_equal(search.heat_price(net, 0.0), cycles.centering(6))


def test_windows_waste_no_time_where_they_need_not():
    equal = [Fraction(1)] * 40
    # At three matchings an iteration ten waste two thirds of one; twelve waste nothing.
    assert search.window_sizes(equal, Fraction(3), [10]) == [12]
    assert search.window_sizes(equal, Fraction(1), [10, 16, 10]) == [10, 16]
    assert search.window_sizes(equal[:5], Fraction(1), [10]) == [5]


def test_it_is_never_worse_than_a_cycle_known_beforehand():
    cube = families.hypercube(3)
    net = network(cube, Fraction(1))
    options = search.Options(weights=(0.6,), horizons=(0.0,), refine=0, sweeps=0, kicks=0)
    alone = search.best_cycle(net, options, [4])[0].error
    known = search.best_cycle(net, options, [4], initial_cycles(cube, net))[0].error
    assert known == pytest.approx(doubling_bound(8, 1.0))
    assert known < alone


def test_a_known_cycle_that_leaves_nothing_is_not_searched_further():
    plan = matcha.plan("complete:128", 0.1)  # 12.7 matchings an iteration; 7 are a mean
    assert plan.consensus_error < 1e-12
    assert "known cycle" in plan.notes[0]


def test_the_cycle_costs_nothing_against_endless_greed():
    topology = families.paper("er16")
    net = network(topology, Fraction(4, 5))
    price, nothing = search.heat_price(net, 0.0), np.zeros((16, 16))
    # Endless: a long run, its beginning (from X = 0) drowned in the rest.
    endless = search.Covariance(net, 0.5, price, nothing)
    matchings, _ = search.greedy_run(net, endless, 1500)
    assert len(matchings) >= 1500
    plan = matcha.plan(topology, 0.1, Greedy(effort="none"))
    assert plan.consensus_error <= 1.02 * endless.error
    assert plan.alpha == 0.5
