"""Base-(k+1): the exact mean for any number of workers, with few partners a round."""

from __future__ import annotations

import math

import numpy as np
import pytest

import matcha
from matcha import families
from matcha.errors import InputError
from matcha.matchings import decompose, is_matching
from matcha.rounds import Round
from matcha.strategies import Base
from matcha.strategies.finite_time import base_rounds, is_power


def matrices(rounds, workers):
    for links in rounds:
        round_ = Round(
            matchings=tuple(map(tuple, links)),
            indices=tuple(range(len(links))),
            mixing="laplacian",
            weight=1.0,
            weights=tuple(tuple(some.values()) for some in links),
        )
        yield round_.matrix(workers)


@pytest.mark.parametrize("base", [2, 3, 4, 5, 6])
def test_any_number_of_workers_agrees_with_at_most_k_partners_a_round(base):
    for workers in (*range(2, 32), 48, 61):
        rounds = base_rounds(workers, base)
        assert all(is_matching(list(links)) for round_ in rounds for links in round_)
        product = np.eye(workers)
        for W in matrices(rounds, workers):
            assert W.min() > -1e-12
            np.testing.assert_allclose(W.sum(axis=0), 1)
            assert (W > 1e-12).sum(axis=1).max() <= base
            product = W @ product
        np.testing.assert_allclose(product, 1 / workers, atol=1e-12)
        assert len(rounds) <= 2 * math.log(workers, base) + 2 + 1e-9


@pytest.mark.parametrize(
    ("workers", "base", "rounds"), [(9, 3, 2), (27, 3, 3), (25, 5, 2), (49, 7, 2), (12, 4, 2)]
)
def test_powers_and_products_take_a_round_a_factor(workers, base, rounds):
    sequence = base_rounds(workers, base)
    assert len(sequence) == rounds
    links = [link for round_ in sequence for matching in round_ for link in matching]
    topology = matcha.Topology.from_links(links)
    plan = matcha.plan(topology, 1.0, "base")
    assert any(f"{rounds} rounds of base {base}" in note for note in plan.notes)
    mixed = x = np.random.default_rng(0).standard_normal((workers, 3))
    for round_ in plan.rounds(0, rounds):
        mixed = round_.mix(mixed)
    np.testing.assert_allclose(mixed, np.broadcast_to(x.mean(axis=0), x.shape), atol=1e-12)
    assert plan.rho == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("workers", [2, 3, 6, 11, 20])
def test_pairs_reach_consensus_at_one_matching_an_iteration(workers):
    rounds = base_rounds(workers, 2)
    topology = families.complete(workers) if workers > 2 else families.path(2)
    plan = matcha.plan(topology, 1 / len(decompose(topology)), Base(mixing="pairwise"))
    assert plan.expected_comm_time == pytest.approx(1.0)
    product = np.eye(workers)
    for round_ in plan.rounds(0, len(rounds)):
        product = round_.matrix(workers) @ product
    np.testing.assert_allclose(product, 1 / workers, atol=1e-12)
    assert plan.rho == pytest.approx(0.0, abs=1e-6)


def test_a_base_whose_links_are_there_is_found_for_a_number_that_is_no_power():
    for workers, base in ((10, 3), (14, 3), (13, 5)):
        sequence = base_rounds(workers, base)
        links = [link for round_ in sequence for matching in round_ for link in matching]
        plan = matcha.plan(matcha.Topology.from_links(sorted(set(links))), 0.7, "base")
        assert f"base {base}" in plan.notes[0]
        assert plan.mixing == "laplacian"
        assert plan.weights is not None
        period = len(plan.schedule.cycle)
        product = np.eye(workers)
        for round_ in plan.rounds(0, period):
            product = round_.matrix(workers) @ product
        np.testing.assert_allclose(product, 1 / workers, atol=1e-12)
        assert 0 < plan.consensus_error < 10


def test_one_round_an_iteration_however_large_the_budget():
    sequence = base_rounds(9, 3)
    links = [link for round_ in sequence for matching in round_ for link in matching]
    plan = matcha.plan(matcha.Topology.from_links(links), 1.0, "base")
    assert [len(round_.matchings) for round_ in plan.rounds(0, 4)] == [3, 3, 3, 3]


def test_what_cannot_be_is_refused():
    assert is_power(27, 3)
    assert not is_power(12, 3)
    with pytest.raises(InputError, match="both are at least 2"):
        base_rounds(1, 2)
    with pytest.raises(InputError, match="bases 2, 3, 4, 5, 6; of base 2 the link"):
        matcha.plan(families.ring(9), 0.5, "base")
    with pytest.raises(InputError, match="bases 2;"):
        matcha.plan(families.ring(9), 0.5, Base(mixing="pairwise"))
