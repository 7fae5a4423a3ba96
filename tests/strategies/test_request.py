"""A request: what a strategy is given is what the user asked for, checked."""

from __future__ import annotations

import pytest

import matcha
from matcha import families
from matcha.errors import InputError
from matcha.strategies import DECOMPOSITIONS, EFFORTS, Request
from matcha.strategies.vanilla import build
from matcha.timing import Units


@pytest.fixture
def asked():
    """What a strategy of one's own was given, by its options."""

    def ask(**options):
        seen = []

        def mine(request):
            seen.append(request)
            return build(request)

        plan = matcha.plan(families.ring(4), strategy=mine, mixing="laplacian", **options)
        assert plan.strategy == "mine"
        return seen[0]

    return ask


def test_a_strategy_is_given_what_was_asked_for(asked):
    own = [[(1, 0), (2, 3)], [(0, 3), (2, 1)]]
    request = asked(budget=0.25, seed=7, alpha=0.1, matchings=own, timing=Units())
    assert (request.budget, request.seed, request.alpha) == (0.25, 7, 0.1)
    # Links are in order, whichever way they were written.
    assert request.matchings == (((0, 1), (2, 3)), ((0, 3), (1, 2)))
    assert (request.strategy, request.mixing) == ("mine", "laplacian")


def test_what_was_not_asked_for_is_left_to_the_strategy(asked):
    given = asked(budget=0.5)
    assert given.matchings is given.probabilities is given.rounds is None
    assert given.alpha is given.weights is None
    # A request made by hand is the same as one that `plan` made of nothing but what it must have.
    bare = Request(
        topology=families.ring(4),
        budget=0.5,
        strategy="mine",
        seed=0,
        mixing="laplacian",
        timing=Units(),
    )
    assert given == bare


def test_every_choice_there_is_can_be_asked_for_and_no_other(asked):
    for name, choices in (("effort", EFFORTS), ("decomposition", DECOMPOSITIONS)):
        for choice in choices:
            assert getattr(asked(budget=0.5, **{name: choice}), name) == choice
        with pytest.raises(InputError, match=name):
            asked(budget=0.5, **{name: "another"})
