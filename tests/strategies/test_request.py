"""A request: what a strategy is given is what the user asked for, checked."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

import matcha
from matcha import families
from matcha.strategies import Request, Strategy, Vanilla
from matcha.timing import Units


@pytest.fixture
def asked():
    """What a strategy of one's own was given, by the arguments of `plan`."""

    def ask(**options):
        seen = []

        def mine(request):
            seen.append(request)
            return Vanilla().build(request)

        plan = matcha.plan(families.ring(4), strategy=mine, **options)
        assert plan.strategy == "mine"
        return seen[0]

    return ask


def test_a_strategy_is_given_what_was_asked_for(asked):
    own = [[(1, 0), (2, 3)], [(0, 3), (2, 1)]]
    request = asked(budget=0.25, seed=7, matchings=own, timing=Units())
    assert (request.budget, request.seed) == (0.25, 7)
    # Links are in order, whichever way they were written.
    assert request.matchings == (((0, 1), (2, 3)), ((0, 3), (1, 2)))
    assert (request.strategy, request.mixing) == ("mine", "laplacian")


def test_what_was_not_asked_for_is_left_to_the_strategy(asked):
    given = asked(budget=0.5)
    assert given.matchings is given.alpha is given.weights is None
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


@dataclass(frozen=True, kw_only=True)
class Scaled(Strategy):
    """A strategy of one's own with options."""

    name = "scaled"
    about = "vanilla with a weight of one's own"
    mixings = ("laplacian",)
    alpha: float | None = None
    times: int = 1

    def build(self, request):
        """As vanilla."""
        assert self.times == 3
        return Vanilla().build(request)


def test_a_class_of_ones_own_has_its_options_checked_and_heeded():
    plan = matcha.plan(families.ring(4), 0.5, Scaled(alpha=0.25, times=3))
    assert (plan.strategy, plan.alpha) == ("scaled", 0.25)
    with pytest.raises(matcha.MatchaError, match="alpha is 3"):
        Scaled(alpha=3)
