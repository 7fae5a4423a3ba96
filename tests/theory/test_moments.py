"""Second moments of random rounds, against sums over all outcomes."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from tests.theory.brute import iterate, matrix, process

from matcha import families
from matcha.errors import InputError
from matcha.schedules import Bernoulli, Choice
from matcha.theory import consensus_error
from matcha.theory.steady_state import second_moment


@pytest.mark.parametrize("mixing", ["laplacian", "pairwise"])
def test_independent_coins_against_all_outcomes(mixing):
    m, matchings = 8, families.paper_matchings("er8")
    p = (0.9, 0.5, 0.3, 0.2, 0.7)
    outcomes = []
    for heads in product((False, True), repeat=5):
        chance = math.prod(q if h else 1 - q for q, h in zip(p, heads, strict=True))
        active = [j for j in range(5) if heads[j]]
        outcomes.append((chance, matrix(matchings, active, m, mixing, 0.3)))
    brute = iterate(lambda k, X: sum(c * W @ X @ W.T for c, W in outcomes), m, 400)
    found = consensus_error(process(matchings, Bernoulli(probabilities=p, seed=0), m, mixing, 0.3))
    assert found == pytest.approx(brute, rel=1e-8)


@pytest.mark.parametrize("mixing", ["laplacian", "pairwise"])
def test_the_map_is_the_mean_over_all_outcomes_and_so_is_its_adjoint(mixing):
    """The trace of a fixed point is the same if the two are swapped; their values are not."""
    m, matchings, p = 8, families.paper_matchings("er8"), (0.9, 0.5, 0.3, 0.2, 0.7)
    rounds = process(matchings, Bernoulli(probabilities=p, seed=0), m, mixing, 0.3)
    root = np.random.default_rng(0).normal(size=(m, m))
    X, forward, back = root @ root.T, np.zeros((m, m)), np.zeros((m, m))
    for heads in product((False, True), repeat=5):
        chance = math.prod(q if h else 1 - q for q, h in zip(p, heads, strict=True))
        W = matrix(matchings, [j for j in range(5) if heads[j]], m, mixing, 0.3)
        forward += chance * W @ X @ W.T
        back += chance * W.T @ X @ W
    np.testing.assert_allclose(second_moment(rounds)(X), forward, rtol=0, atol=1e-12)
    np.testing.assert_allclose(second_moment(rounds, adjoint=True)(X), back, rtol=0, atol=1e-12)


def test_grouped_coins_share_their_fate():
    m, matchings = 8, families.paper_matchings("er8")
    schedule = Bernoulli(
        probabilities=(0.4, 0.4, 0.6, 0.6, 0.6), groups=((0, 1), (2, 3, 4)), seed=0
    )
    parts = [matrix(matchings, g, m, "laplacian", 1.0) - np.eye(m) for g in ((0, 1), (2, 3, 4))]
    Ws = [
        (
            (0.4 if a else 0.6) * (0.6 if b else 0.4),
            np.eye(m) + 0.25 * (a * parts[0] + b * parts[1]),
        )
        for a, b in product((0, 1), repeat=2)
    ]
    brute = iterate(lambda k, X: sum(c * W @ X @ W.T for c, W in Ws), m, 600)
    found = consensus_error(process(matchings, schedule, m, "laplacian", 0.25))
    assert found == pytest.approx(brute, rel=1e-8)


def test_choice_against_its_expectation():
    m, matchings = 8, families.paper_matchings("er8")
    p = (0.3, 0.2, 0.2, 0.1, 0.1)
    Ws = [matrix(matchings, (j,), m, "pairwise", 0.5) for j in range(5)]
    brute = iterate(
        lambda k, X: 0.1 * X + sum(q * W @ X @ W for q, W in zip(p, Ws, strict=True)), m
    )
    found = consensus_error(process(matchings, Choice(probabilities=p, seed=0), m, "pairwise", 0.5))
    assert found == pytest.approx(brute, rel=1e-8)


def test_too_large_a_weight_diverges():
    topology = families.complete(8)
    matchings = tuple((link,) for link in topology.links)
    schedule = Bernoulli(probabilities=(0.9,) * len(matchings), seed=0)
    assert consensus_error(process(matchings, schedule, 8, "laplacian", 0.9)) == math.inf


@pytest.mark.parametrize("mixing", ["laplacian", "pairwise"])
@pytest.mark.parametrize("kind", [Bernoulli, Choice])
def test_the_adjoint_is_the_transpose_of_the_map(mixing, kind):
    matchings, rng = families.paper_matchings("er8"), np.random.default_rng(0)
    schedule = kind(probabilities=(0.3, 0.2, 0.1, 0.3, 0.1), seed=0)
    there, back = (
        second_moment(process(matchings, schedule, 8, mixing, 0.4), adjoint=adjoint)
        for adjoint in (False, True)
    )
    X, V = (a @ a.T for a in rng.normal(size=(2, 8, 8)))
    assert np.sum(V * there(X)) == pytest.approx(np.sum(back(V) * X))
    # Everybody alike stays alike.
    np.testing.assert_allclose(there(np.ones((8, 8))), np.ones((8, 8)))


def test_pairwise_mixing_has_no_coins_for_groups():
    schedule = Bernoulli(probabilities=(0.5, 0.5), groups=((0, 1),), seed=0)
    with pytest.raises(InputError, match="a coin for each matching"):
        second_moment(process((((0, 1),), ((1, 2),)), schedule, 3, "pairwise", 0.5))
