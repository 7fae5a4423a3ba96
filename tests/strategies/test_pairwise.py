"""Pairwise mixing: the exact rho against all outcomes, and its optimisation."""

import math
from itertools import product

import numpy as np
import pytest
from tests.theory.brute import process

import matcha
from matcha import families, theory
from matcha.activation import optimal_probabilities
from matcha.errors import InputError
from matcha.rounds import Round
from matcha.schedules import Bernoulli
from matcha.strategies import Matcha
from matcha.strategies import matcha as pairwise
from matcha.theory import cycles


def brute_rho(matchings, p, m):
    total = np.zeros((m, m))
    for heads in product((False, True), repeat=len(p)):
        chance = math.prod(q if h else 1 - q for q, h in zip(p, heads, strict=True))
        active = tuple(j for j in range(len(p)) if heads[j])
        W = Round(
            matchings=tuple(matchings[j] for j in active),
            indices=active,
            mixing="pairwise",
            weight=0.5,
        ).matrix(m)
        total += chance * W.T @ W
    return np.linalg.eigvalsh(total - 1 / m)[-1]


def rho(matchings, p, m):
    schedule = Bernoulli(probabilities=tuple(p), seed=0)
    return theory.contraction(process(matchings, schedule, m, "pairwise", 0.5))


@pytest.mark.parametrize("p", [(0.9, 0.5, 0.3, 0.2, 0.7), (1.0, 1.0, 0.0, 0.5, 0.1)])
def test_rho_against_all_outcomes(p):
    matchings = families.paper_matchings("er8")
    assert rho(matchings, p, 8) == pytest.approx(brute_rho(matchings, p, 8))


def test_the_order_of_exchange_matters_and_is_right():
    matchings = families.paper_matchings("er8")
    p = (0.9, 0.8, 0.7, 0.6, 0.5)
    backward = rho(matchings[::-1], p[::-1], 8)
    assert backward == pytest.approx(brute_rho(matchings[::-1], p[::-1], 8))
    assert backward != pytest.approx(rho(matchings, p, 8), rel=1e-6)


def test_gradient_against_differences():
    matchings = families.paper_matchings("er8")
    search = pairwise._PairwiseSearch([cycles.step(matching) for matching in matchings], 8)
    p, order = np.array([0.9, 0.5, 0.3, 0.2, 0.7]), [2, 0, 1, 4, 3]
    gradient = search.gradient(p, order)
    # The mixture over nearly-largest eigenvalues is not the gradient of the largest one, but it
    # is close where that one stands alone.
    for j in range(5):
        bump = np.eye(5)[j] * 1e-6
        slope = (search.rho(p + bump, order) - search.rho(p - bump, order)) / 2e-6
        assert gradient[j] == pytest.approx(slope, abs=0.02)


@pytest.mark.parametrize("name", ["er8", "geometric16-d10", "er16"])
@pytest.mark.parametrize("budget", [0.1, 0.5])
def test_never_worse_than_the_connectivity_solution(name, budget):
    matchings, topology = families.paper_matchings(name), families.paper(name)
    m, limit = topology.num_workers, budget * len(matchings)
    start = optimal_probabilities(matchings, m, limit).probabilities
    best = pairwise.optimal_activation(matchings, start, m, limit, [1.0] * len(matchings))
    assert best.start_rho == pytest.approx(rho(matchings, start, m))
    assert best.rho <= best.start_rho
    assert sum(best.probabilities) <= limit * (1 + 1e-9)
    ordered = [matchings[j] for j in best.order]
    assert sorted(best.order) == list(range(len(matchings)))
    assert best.rho == pytest.approx(rho(ordered, best.probabilities, m), abs=1e-12)


def test_matcha_with_pairwise_mixing():
    topology = families.paper("geometric16-d10")
    paper = families.paper_matchings("geometric16-d10")
    ours = matcha.plan(topology, 0.3, Matcha(mixing="pairwise"), matchings=paper)
    theirs = matcha.plan(topology, 0.3, "matcha", matchings=paper)
    assert ours.mixing == "pairwise"
    assert ours.alpha == 0.5
    assert ours.rho < 0.9 * theirs.rho
    assert ours.consensus_error < 0.5 * theirs.consensus_error
    assert ours.expected_comm_time <= 0.3 * ours.num_colors * (1 + 1e-9)
    assert ours.rho == pytest.approx(rho(ours.matchings, ours.probabilities, 16))


def test_shared_coins_and_too_many_workers_are_refused():
    topology = families.complete(6)
    with pytest.raises(InputError, match="cliques share coins"):
        matcha.plan(topology, 0.5, Matcha(mixing="pairwise", decomposition="cliques"))
    with pytest.raises(InputError, match="use the greedy strategy"):
        pairwise.optimal_activation([((0, 1),)], [1.0], 5000, 1.0, [1.0])


def test_projection_keeps_the_budget_and_nearby_points():
    rng = np.random.default_rng(0)
    for _ in range(20):
        p, costs = rng.normal(0.5, 0.6, 6), rng.uniform(0.2, 3.0, 6)
        limit = rng.uniform(0.1, 5.0)
        q = pairwise.project(p, costs, limit)
        assert (q >= 0).all()
        assert (q <= 1).all()
        assert q @ costs <= limit * (1 + 1e-9)
        # No feasible point is closer.
        for other in rng.uniform(0, 1, (50, 6)):
            other *= min(1.0, limit / (other @ costs))
            assert np.linalg.norm(q - p) <= np.linalg.norm(other - p) + 1e-9
