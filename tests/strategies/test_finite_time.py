"""Finite-time sequences reach exact consensus, and greedy stands up to them."""

import numpy as np
import pytest

import matcha
from matcha import families, theory
from matcha.errors import InputError
from matcha.matchings import is_matching
from matcha.strategies.finite_time import (
    base_matchings,
    finite_time_plan,
    hypercube_matchings,
    one_peer_exponential,
    one_peer_exponential_error,
)


@pytest.mark.parametrize(("workers", "base"), [(8, 2), (16, 2), (9, 3), (27, 3), (16, 4)])
def test_exact_consensus_after_one_turn(workers, base):
    rounds = base_matchings(workers, base)
    assert base ** len(rounds) == workers
    assert all(is_matching(matching) for round_ in rounds for matching in round_)
    colors = workers - 1 if workers % 2 == 0 else workers
    plan = finite_time_plan(workers, len(rounds[0]) / colors, base=base)
    x = np.random.default_rng(0).standard_normal((workers, 3))
    mixed = x
    for k in range(len(rounds)):
        mixed = plan.round(k).mix(mixed)
    np.testing.assert_allclose(mixed, np.broadcast_to(x.mean(axis=0), x.shape), atol=1e-12)
    assert plan.rho == pytest.approx(0.0, abs=1e-9)
    assert plan.expected_comm_time == pytest.approx(len(rounds[0]))


def test_one_peer_exponential_is_doubly_stochastic_and_exact_for_powers_of_two():
    for workers in (6, 8, 16):
        product = np.eye(workers)
        for W in one_peer_exponential(workers):
            np.testing.assert_allclose(W.sum(axis=0), 1)
            np.testing.assert_allclose(W.sum(axis=1), 1)
            product = W @ product
        exact = np.allclose(product, 1 / workers)
        assert exact == (workers in (8, 16))
    assert one_peer_exponential_error(8, 1.0) == pytest.approx(theory.doubling_bound(8, 1.0))
    assert one_peer_exponential_error(6, 1.0) > theory.doubling_bound(6, 1.0)


@pytest.mark.parametrize("units", [0.5, 1.0, 2.0])
def test_greedy_on_a_complete_graph_is_no_worse(units):
    greedy = matcha.plan(families.complete(8), units / 7, "greedy")
    known = finite_time_plan(8, units / 7)
    assert greedy.expected_comm_time == pytest.approx(known.expected_comm_time)
    assert greedy.consensus_error <= known.consensus_error * (1 + 1e-9)
    assert greedy.consensus_error >= theory.doubling_bound(8, units) - 1e-12


def test_wrong_sizes_are_refused():
    assert hypercube_matchings(12) == ()
    assert len(hypercube_matchings(32)) == 5
    with pytest.raises(InputError, match="power of 3"):
        base_matchings(10, 3)
    with pytest.raises(InputError, match="budget"):
        finite_time_plan(8, 0.0)
