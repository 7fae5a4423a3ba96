"""Weights a link: the gradient is the slope, the error falls, averages are kept."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from tests.strategies.greedy.networks import network

from matcha import families
from matcha.strategies.greedy.candidates import Candidate
from matcha.strategies.greedy.weights import _error_and_gradient, _groups, optimize_weights


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
