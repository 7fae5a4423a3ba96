from __future__ import annotations

import pytest

import matcha
from matcha.errors import InputError
from matcha.strategies import Single


def test_at_most_one_matching_an_iteration():
    plan = matcha.plan(matcha.families.paper("er8"), 0.2, "single")
    assert {len(plan.round(k).matchings) for k in range(500)} <= {0, 1}
    assert sum(plan.probabilities) <= 0.2 * len(plan.matchings) + 1e-9


def test_both_ends_take_their_mean_so_the_two_mixings_are_one():
    topology = matcha.families.ring(4)
    laplacian = matcha.plan(topology, 0.5, Single(mixing="laplacian"))
    pairwise = matcha.plan(topology, 0.5, Single(mixing="pairwise"))
    assert laplacian.alpha == pairwise.alpha == 0.5
    assert laplacian.rho == pytest.approx(pairwise.rho)


def test_own_probabilities_beyond_the_budget_are_refused():
    with pytest.raises(InputError):
        matcha.plan(matcha.families.ring(4), 0.1, Single(probabilities=[0.5, 0.5]))
