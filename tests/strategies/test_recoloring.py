"""The search for a better decomposition: the bars, and what it must never do."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.graphs import topologies

import matcha
from matcha import families
from matcha.matchings import decompose, is_decomposition
from matcha.strategies import Matcha, Request
from matcha.strategies.recoloring import _least_of_each, improve
from matcha.timing import LinkSeconds, Units

BARS = {
    "er8": 0.6440,
    "geometric16-d5": 0.9400,
    "geometric16-d10": 0.7300,
    "geometric16-d13": 0.4000,
    "er16": 0.6600,
}


def request(topology, budget, *, seed=0, matchings=None):
    return Request(
        topology=topology,
        budget=budget,
        strategy="matcha",
        seed=seed,
        mixing="laplacian",
        timing=Units(),
        matchings=matchings,
    )


@pytest.mark.parametrize("name", BARS)
def test_from_links_alone_the_plan_is_at_least_this_good(name):
    plan = matcha.plan(families.paper(name), budget=0.5, strategy="matcha")
    assert len(plan.matchings) == families.paper(name).max_degree
    assert plan.rho <= BARS[name]


@settings(max_examples=15)
@given(topologies(max_workers=9), st.sampled_from([0.1, 0.4, 0.8]), st.integers(0, 3))
def test_improved_decompositions_verify_and_are_never_worse(topology, budget, seed):
    before = decompose(topology)
    after = improve(request(topology, budget, seed=seed, matchings=before))
    assert is_decomposition(topology, after)
    assert len(after) == len(before)
    rho = {}
    for name, matchings in (("before", before), ("after", after)):
        rho[name] = matcha.plan(topology, budget, matchings=matchings).rho
    assert rho["after"] <= rho["before"] + 1e-6


def test_medium_graphs_improve_too():
    topology = families.erdos_renyi(32, 0.2, seed=1)
    plain = matcha.plan(topology, 0.5, Matcha(effort="none"))
    better = matcha.plan(topology, 0.5, "matcha")
    assert better.rho < plain.rho - 0.01


def test_effort_none_and_a_full_budget_change_nothing():
    topology, large = families.paper("er16"), families.ring(200)
    before = decompose(topology)
    assert improve(request(topology, 0.5), "none") == before
    assert improve(request(topology, 1.0)) == before
    assert improve(request(large, 0.5)) == decompose(large)


def test_more_effort_is_not_worse():
    topology = families.paper("er8")
    default = matcha.plan(topology, 0.3, "matcha").rho
    high = matcha.plan(topology, 0.3, Matcha(effort="high")).rho
    assert high <= default + 1e-6


def test_very_many_colors_are_sampled():
    topology = families.complete(26)
    plan = matcha.plan(topology, 0.5, "matcha")
    assert is_decomposition(topology, plan.matchings)
    assert plan.rho <= matcha.plan(topology, 0.5, Matcha(effort="none")).rho + 1e-6


def test_slow_links_are_compared_at_equal_seconds():
    topology = families.paper("geometric16-d10")
    slow = {0, 8, 11}
    times = [10.0 if slow.intersection(link) else 1.0 for link in topology.links]
    timed = topology.with_link_times(times)
    start = decompose(timed)
    seconds = 0.3 * LinkSeconds(timed).round_time(start)
    plain = matcha.plan(timed, 0.3, Matcha(effort="none"))
    better = matcha.plan(timed, 0.3, "matcha")
    assert better.expected_comm_time <= seconds + 1e-9
    assert plain.expected_comm_time <= seconds + 1e-9
    assert better.rho < plain.rho


def test_stacked_search_along_alpha_finds_the_minimum():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((20, 6, 9))
    P = X @ X.swapaxes(1, 2) / 9
    Q = P @ P + 0.3 * P
    alpha, rho = _least_of_each(P, Q)

    def height(a):
        a = a[:, None, None]
        return np.linalg.eigvalsh(np.eye(6) - 2 * a * P + a**2 * Q)[:, -1]

    np.testing.assert_allclose(height(alpha), rho, rtol=1e-9)
    for factor in (0.98, 0.999, 1.001, 1.02):
        assert (height(alpha * factor) >= rho - 1e-6).all()
