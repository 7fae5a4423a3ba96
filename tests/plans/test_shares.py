"""Weights a link: one for each, in [0, 1], kept beside the links that are left."""

from __future__ import annotations

from dataclasses import replace

import pytest

import matcha
from matcha.errors import PlanError
from matcha.plans.shares import check_shares, kept_shares, shares_from_json, spread

MATCHINGS = (((0, 1), (2, 3)), ((1, 2),))


def test_weights_that_fit_are_taken():
    for mixing, repeats in (("laplacian", False), ("pairwise", True), ("push", True)):
        check_shares(((0.0, 1.0), (0.5,)), MATCHINGS, mixing, repeats=repeats)
        with pytest.raises(PlanError, match="one for each link"):
            check_shares(((0.0, 1.0),), MATCHINGS, mixing, repeats=repeats)


@pytest.mark.parametrize(
    ("weights", "repeats", "message"),
    [
        (((0.5, 0.5), ()), True, "one for each link"),
        (((0.5, 1.5), (0.5,)), True, r"in \[0, 1\]"),
        (((0.5, float("nan")), (0.5,)), True, r"in \[0, 1\]"),
        (((0.5, 0.5), (0.5,)), False, "rounds that repeat"),
    ],
)
def test_weights_that_do_not_are_refused(weights, repeats, message):
    with pytest.raises(PlanError, match=message):
        check_shares(weights, MATCHINGS, "pairwise", repeats=repeats)


def test_links_that_are_left_keep_their_weights():
    weights = ((0.1, 0.2), (0.3,))
    assert kept_shares(weights, MATCHINGS, (((2, 3),), ())) == ((0.2,), ())
    assert kept_shares(weights, MATCHINGS, MATCHINGS) == weights
    assert kept_shares(None, MATCHINGS, MATCHINGS) is None


def test_they_are_read_and_told():
    assert shares_from_json([[0, 1], [0.5]]) == ((0.0, 1.0), (0.5,))
    assert shares_from_json(None) is None
    assert spread(((0.123, 0.9), (0.5,)), 0.5) == "weights 0.12 to 0.90"
    assert spread(None, 0.5) == "weight 0.5000"


def test_alpha_is_not_changed_where_weights_a_link_stand_in_its_place():
    plan = matcha.plan(matcha.families.complete(3), 0.5, "base", mixing="pairwise")
    assert plan.weights is not None
    with pytest.raises(PlanError, match="weights=None as well"):
        replace(plan, alpha=0.4)
    own = replace(plan, alpha=0.4, weights=None)
    assert own.digest != plan.digest
    assert own.round(len(own.schedule.cycle) - 1).weight == 0.4
    heavier = replace(plan, alpha=0.4, weights=tuple((0.4,) * len(w) for w in plan.weights))
    assert heavier.mixing_matrix(0).tolist() == own.mixing_matrix(0).tolist()


def test_the_digest_is_of_the_rounds_alone():
    plan = matcha.plan(matcha.families.complete(3), 0.5, "base", mixing="pairwise")
    document = plan.to_json() | {"alpha": 0.4}  # as a plan that another version wrote
    assert matcha.Plan.from_json(document).digest == plan.digest
