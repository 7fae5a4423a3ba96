"""Weights a link: one for each, in [0, 1], kept beside the links that are left."""

from __future__ import annotations

import pytest

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
