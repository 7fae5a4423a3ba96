"""Finite-time sequences reach exact consensus, and greedy stands up to them."""

import math

import numpy as np
import pytest

import matcha
from matcha import families, theory
from matcha.errors import InputError
from matcha.matchings import decompose, is_matching
from matcha.strategies.finite_time import base_matchings, base_two_rounds, hypercube_matchings
from matcha.timing import LinkSeconds


@pytest.mark.parametrize(("workers", "base"), [(8, 2), (16, 2), (9, 3), (27, 3), (16, 4), (25, 5)])
def test_exact_consensus_after_one_turn(workers, base):
    rounds = base_matchings(workers, base)
    assert base ** len(rounds) == workers
    assert all(is_matching(matching) for round_ in rounds for matching in round_)
    links = [link for round_ in rounds for matching in round_ for link in matching]
    topology = matcha.Topology.from_links(links)
    budget = min(1.0, len(rounds[0]) / topology.max_degree)
    strategy = "hypercube" if base == 2 else "base"
    plan = matcha.plan(topology, budget, strategy)
    x = np.random.default_rng(0).standard_normal((workers, 3))
    mixed = x
    for k in range(len(rounds)):
        mixed = plan.round(k).mix(mixed)
    np.testing.assert_allclose(mixed, np.broadcast_to(x.mean(axis=0), x.shape), atol=1e-12)
    assert plan.rho == pytest.approx(0.0, abs=1e-9)
    assert plan.smallest_self_weight == pytest.approx(1 / base)


@pytest.mark.parametrize("workers", [2, 3, 6, 7, 11, 12, 20, 27])
def test_base_two_reaches_consensus_for_any_number_of_workers(workers):
    rounds = base_two_rounds(workers)
    assert all(is_matching(sorted(links)) for links in rounds)
    assert len(rounds) <= 2 * math.ceil(math.log2(workers)) + 1
    topology = families.complete(workers) if workers > 2 else families.path(2)
    plan = matcha.plan(topology, 1 / len(decompose(topology)), "base", mixing="pairwise")
    assert plan.expected_comm_time == pytest.approx(1.0)
    x = np.random.default_rng(0).standard_normal((workers, 3))
    mixed = x
    for k in range(len(rounds)):
        mixed = plan.round(k).mix(mixed)
    np.testing.assert_allclose(mixed, np.broadcast_to(x.mean(axis=0), x.shape), atol=1e-12)
    assert plan.rho == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("budget", [0.1, 0.35, 1.0])
@pytest.mark.parametrize("timed", [False, True])
def test_the_budget_is_kept(budget, timed):
    for topology, strategy in (
        (families.hypercube(3), "hypercube"),
        (families.complete(9), "base"),
    ):
        if timed:
            topology = topology.with_link_times(
                [0.1 + 0.01 * e for e in range(len(topology.links))]
            )
        plan = matcha.plan(topology, budget, strategy)
        full = matcha.plan(topology, strategy="vanilla").expected_comm_time
        assert plan.expected_comm_time <= budget * full * (1 + 1e-9)
        assert plan.rho < 1
        assert isinstance(plan.timing, LinkSeconds) == timed


def test_one_digit_an_iteration_however_large_the_budget():
    plan = matcha.plan(families.complete(9), 1.0, "base")
    assert [len(plan.round(k).matchings) for k in range(4)] == [3, 3, 3, 3]


@pytest.mark.parametrize("units", [0.5, 1.0, 2.0])
def test_greedy_on_a_complete_graph_is_no_worse(units):
    greedy = matcha.plan(families.complete(8), units / 7, "greedy")
    known = matcha.plan(families.complete(8), units / 7, "hypercube")
    assert greedy.expected_comm_time == pytest.approx(known.expected_comm_time)
    assert greedy.consensus_error <= known.consensus_error * (1 + 1e-9)
    assert greedy.consensus_error >= theory.doubling_bound(8, units) - 1e-12


def test_wrong_sizes_and_missing_links_are_refused():
    assert hypercube_matchings(12) == ()
    assert len(hypercube_matchings(32)) == 5
    with pytest.raises(InputError, match="power of 3"):
        base_matchings(10, 3)
    with pytest.raises(InputError, match="power of 2 workers, not 6"):
        matcha.plan(families.ring(6), 0.5, "hypercube")
    with pytest.raises(InputError, match=r"the link \(\d, \d\)"):
        matcha.plan(families.ring(8), 0.5, "hypercube")
    with pytest.raises(InputError, match="bases 2, 3"):
        matcha.plan(families.ring(9), 0.5, "base")
