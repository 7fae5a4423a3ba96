"""Weights a link: the gradient is the slope, the error falls, averages are kept."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from matcha import families
from matcha.strategies.greedy.candidates import Candidate, Network
from matcha.strategies.greedy.heaviest import heaviest_permutation
from matcha.strategies.greedy.weights import _error_and_gradient, _groups, weighted


def network(name, *, directed):
    topology = families.parse(name)
    links = np.array([(r, s) for s, r in topology.arrows]) if directed else topology.link_array
    times = (Fraction(1),) * len(links)
    return Network(
        num_workers=topology.num_workers,
        links=links,
        times=times,
        rate=Fraction(1, 2),
        directed=directed,
    )


def some_cycle(net, length=8, seed=0):
    rng = np.random.default_rng(seed)
    matchings = tuple(net.heaviest(rng.random(len(net.links))) for _ in range(length))
    return Candidate(
        network=net, matchings=matchings, costs=(Fraction(1),) * length, weight=0.55
    ).scored()


@pytest.mark.parametrize("directed", [False, True])
def test_the_gradient_is_the_slope_and_descent_pays(directed):
    start = some_cycle(network("paper:er8", directed=directed))
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
    better = weighted(start)
    assert better.error < 0.99 * start.error
    assert better.error == pytest.approx(better.scored().error)


def test_the_heaviest_permutation_is_the_best_of_all():
    from itertools import permutations

    rng = np.random.default_rng(3)
    net = network("paper:er8", directed=True)
    for _ in range(5):
        weights = rng.normal(size=len(net.links))
        worth = {(int(r), int(s)): w for (r, s), w in zip(net.links, weights, strict=True)}
        chosen = heaviest_permutation(net.links, weights, 8)
        assert sorted(net.links[chosen, 0]) == sorted(net.links[chosen, 1])
        allowed = [[s for s in range(8) if s == r or (r, s) in worth] for r in range(8)]
        best = max(
            sum(worth.get((r, s), 0.0) for r, s in enumerate(sigma))
            for sigma in permutations(range(8))
            if all(s in allowed[r] for r, s in enumerate(sigma))
        )
        assert weights[chosen].sum() == pytest.approx(best)
