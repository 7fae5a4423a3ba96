"""Finite-time sequences reach exact consensus, and greedy stands up to them."""

import numpy as np
import pytest
from benchmarks.parts.supports import doubling_bound

import matcha
from matcha import families
from matcha.errors import InputError
from matcha.strategies import Greedy
from matcha.strategies.finite_time import hypercube_matchings
from matcha.timing import LinkSeconds


@pytest.mark.parametrize("workers", [2, 8, 16])
def test_a_hypercube_agrees_after_one_turn(workers):
    rounds = hypercube_matchings(workers)
    topology = matcha.Topology.from_links([link for matching in rounds for link in matching])
    plan = matcha.plan(topology, 1 / len(rounds), "hypercube")
    product = np.eye(workers)
    for round_ in plan.rounds(0, len(rounds)):
        product = round_.matrix(workers) @ product
    np.testing.assert_allclose(product, 1 / workers, atol=1e-12)
    assert plan.rho == pytest.approx(0.0, abs=1e-9)
    assert plan.smallest_self_weight == 0.5


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


@pytest.mark.parametrize("units", [0.5, 1.0, 2.0])
def test_greedy_on_a_complete_graph_is_no_worse(units):
    greedy = matcha.plan(families.complete(8), units / 7, Greedy(effort="none"))
    known = matcha.plan(families.complete(8), units / 7, "hypercube")
    assert greedy.expected_comm_time == pytest.approx(known.expected_comm_time)
    assert greedy.consensus_error <= known.consensus_error * (1 + 1e-9)
    assert greedy.consensus_error >= doubling_bound(8, units) - 1e-12


def test_wrong_sizes_and_missing_links_are_refused():
    assert hypercube_matchings(12) == ()
    assert len(hypercube_matchings(32)) == 5
    with pytest.raises(InputError, match="power of 2 workers, not 6"):
        matcha.plan(families.ring(6), 0.5, "hypercube")
    with pytest.raises(InputError, match=r"the link from worker \d to \d"):
        matcha.plan(families.ring(8), 0.5, "hypercube")


# -- one peer -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "rounds"), [(2, 1), (8, 3), (16, 4)])
def test_one_peer_a_power_of_two_has_the_mean_after_all_hops(workers, rounds):
    plan = matcha.plan(families.complete(workers), 1 / (workers - 1), "one-peer")
    product = np.eye(workers)
    for round_ in plan.rounds(0, rounds):
        product = round_.matrix(workers) @ product
    np.testing.assert_allclose(product, 1 / workers)
    assert any("exact consensus" in note for note in plan.notes)


def test_others_come_close_and_do_not_claim_to_be_exact():
    plan = matcha.plan(families.complete(6), 0.2, "one-peer")
    hops = [{(j - i) % 6 for i, j in round_.links} for round_ in plan.rounds(0, 4)]
    assert hops == [{1}, {2}, {4}, {1}]
    assert all(len(round_.links) == 6 for round_ in plan.rounds(0, 4))
    assert 0 < plan.rho < 1
    assert not any("exact" in note for note in plan.notes)


def test_a_missing_arrow_is_named():
    with pytest.raises(InputError, match="one-peer needs the link from worker 0 to 2"):
        matcha.plan(families.ring(8), 0.5, "one-peer")
