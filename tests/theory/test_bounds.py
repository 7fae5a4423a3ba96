from __future__ import annotations

import math

import pytest
from benchmarks.parts.supports import doubling_bound

import matcha
from matcha import families, theory
from matcha.errors import InputError
from matcha.strategies import Greedy, strategy_with
from matcha.theory import admissible_learning_rate, gradient_bound

CASE = {
    "num_workers": 4,
    "iterations": 100,
    "learning_rate": 0.01,
    "smoothness": 1.0,
    "gradient_variance": 1.0,
    "dissimilarity": 0.5,
    "initial_gap": 1.0,
}


def test_a_network_that_mixes_at_once_has_the_bound_of_one_machine():
    synchronous = 2 * 1.0 / (0.01 * 100) + 0.01 * 1.0 / 4
    assert gradient_bound(rho=0.0, **CASE) == pytest.approx(synchronous)


def test_worse_mixing_promises_less():
    bounds = [gradient_bound(rho=rho, **CASE) for rho in (0.0, 0.3, 0.6, 0.9)]
    assert bounds == sorted(bounds)
    assert len(set(bounds)) == 4


@pytest.mark.parametrize("rho", [0.1, 0.5, 0.95])
def test_the_admissible_rate_is_theorem_2s(rho):
    rate = admissible_learning_rate(rho, smoothness=2.0)
    assert 2.0 * rate == pytest.approx(min(1.0, (rho**-0.5 - 1) / 4))
    assert math.isfinite(
        gradient_bound(**{**CASE, "smoothness": 2.0, "learning_rate": rate}, rho=rho)
    )
    with pytest.raises(InputError, match="Theorem 2 holds for"):
        gradient_bound(**{**CASE, "smoothness": 2.0, "learning_rate": 1.01 * rate}, rho=rho)


def test_nothing_is_promised_without_contraction():
    with pytest.raises(InputError):
        admissible_learning_rate(1.5, smoothness=1.0)
    with pytest.raises(InputError, match="smoothness"):
        admissible_learning_rate(0.5, smoothness=0.0)


def test_more_matchings_leave_less_disagreement():
    errors = [doubling_bound(16, rate) for rate in (0.1, 0.5, 1.0, 4.0)]
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("name", ["paper:er8", "star:6", "path:5", "ring:8", "complete:6"])
@pytest.mark.parametrize("budget", [0.1, 0.5])
def test_no_schedule_goes_below_the_bound_of_its_graph(name, budget):
    topology = families.parse(name)
    plan = matcha.plan(topology, budget, Greedy(effort="none"))
    pace = plan.expected_comm_time
    sharper = theory.graph_bound(topology, pace)
    assert doubling_bound(topology.num_workers, pace) <= sharper * (1 + 1e-9)
    assert sharper <= plan.consensus_error * (1 + 1e-9)


def test_a_star_can_do_little_at_a_time():
    assert theory.graph_bound(families.star(16), 1.0) > 4 * doubling_bound(16, 1.0)
    with pytest.raises(InputError, match="positive number of matchings"):
        theory.graph_bound(families.ring(4), 0.0)


@pytest.mark.parametrize("strategy", ["one-peer", "base", "ceca", "hypercube", "greedy"])
def test_every_plan_of_pairs_or_messages_has_a_certificate(strategy):
    mixing = "pairwise" if strategy == "base" else None
    plan = matcha.plan(
        families.complete(8), 1 / 7, strategy_with(strategy, mixing=mixing, effort="none")
    )
    bound = theory.error_bound(plan.process)
    assert bound == 0.5
    assert plan.consensus_error >= bound * (1 - 1e-9)
    triangle = matcha.plan(families.complete(3), 1 / 3, Greedy(effort="none", mixing="push"))
    assert (
        theory.error_bound(triangle.process) <= triangle.consensus_error
    )  # circles of three beat pairs
    assert theory.error_bound(matcha.plan(families.ring(4), 0.5, "allreduce").process) is None
    assert theory.error_bound(matcha.plan(families.ring(4), 0.5, "silent").process) is None
