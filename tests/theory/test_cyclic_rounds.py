"""Rounds that repeat, against iteration; push-sum against rounds that keep shares."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tests.theory.brute import iterate, matrix, process

import matcha
from matcha import families
from matcha.schedules import Cycle, EvenlySpaced
from matcha.strategies import Greedy, Rounds
from matcha.theory import consensus_error, push_sum_weights
from matcha.theory.steady_state import cycle_contraction, mixing_matrices, push_sum_error


@pytest.mark.parametrize("mixing", ["laplacian", "pairwise"])
@pytest.mark.parametrize(
    ("schedule", "period"),
    [
        (EvenlySpaced(frequency=0.4, num_matchings=5), 5),
        (Cycle(cycle=((0, 2), (), (4, 1), (3,)), num_matchings=5), 4),
        (EvenlySpaced(frequency=1.0, num_matchings=5), 1),
    ],
)
def test_deterministic_schedules_against_iteration(mixing, schedule, period):
    m, matchings = 8, families.paper_matchings("er8")
    Ws = [matrix(matchings, schedule.active(k), m, mixing, 0.25) for k in range(period)]
    brute = iterate(lambda k, X: Ws[k % period] @ X @ Ws[k % period].T, m, 400 * period, period)
    found = consensus_error(process(matchings, schedule, m, mixing, 0.25))
    assert found == pytest.approx(brute, rel=1e-8)


@pytest.mark.parametrize("mixing", ["laplacian", "pairwise"])
def test_a_schedule_that_leaves_someone_out_never_settles(mixing):
    matchings = (((0, 1),), ((1, 2),))
    for schedule in (
        Cycle(cycle=((0,),), num_matchings=2),
        EvenlySpaced(frequency=1.0, num_matchings=2),
    ):
        error = consensus_error(process(matchings, schedule, 4, mixing, 0.4))
        assert error == math.inf


def test_push_sum_in_circles_is_plain_averaging():
    # Messages round a ring keep everybody's share at one: both analyses must agree.
    ring = (tuple((i, (i + 1) % 5) for i in range(5)),)
    rounds = process(ring, Cycle(cycle=((0,),), num_matchings=1), 5, "push", 0.3)
    (W,) = mixing_matrices(rounds)
    brute = iterate(lambda k, X: W @ X @ W.T, 5, 400)
    assert push_sum_error([W], 5) == pytest.approx(brute)
    assert consensus_error(rounds) == pytest.approx(brute)


@pytest.mark.parametrize("mixing", ["laplacian", "pairwise"])
def test_contraction_is_the_norm_of_a_cycles_product(mixing):
    matchings, cycle = families.paper_matchings("er8"), ((0, 2), (), (4, 1), (3,))
    product = np.eye(8) - 1 / 8
    for active in cycle:
        product = matrix(matchings, active, 8, mixing, 0.25) @ product
    schedule = Cycle(cycle=cycle, num_matchings=5)
    found = cycle_contraction(process(matchings, schedule, 8, mixing, 0.25))
    assert found == pytest.approx(np.linalg.norm(product, 2) ** (2 / 4))


def test_push_sum_weights_are_those_that_the_rounds_settle_to():
    ring = matcha.Topology.from_links([(0, 1), (1, 2), (2, 0), (1, 0)], directed=True)
    plan = matcha.plan(
        ring, 1.0, Rounds(rounds=[[], [[(0, 1)]], [[(1, 2)]], [[(2, 0)]], [[(1, 0)]]])
    )
    omega, seen = np.ones(3), []
    for k, round_ in enumerate(plan.rounds(0, 5 * 60)):
        omega = round_.mix(omega)
        if k >= 5 * 59:
            seen.append(omega)
    np.testing.assert_allclose(push_sum_weights(plan.process), np.mean(seen, axis=0), atol=1e-12)
    assert plan.omega == push_sum_weights(plan.process)
    assert matcha.plan(ring, 0.5, Greedy(effort="none")).omega is None
