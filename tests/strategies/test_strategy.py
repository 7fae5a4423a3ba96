"""A request: what a strategy is given is what the user asked for, checked."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

import matcha
from matcha import families
from matcha.errors import InputError
from matcha.schedules import Cycle
from matcha.strategies import Request, Strategy, Vanilla
from matcha.strategies.strategy import (
    LONGEST_CYCLE,
    assemble_plan,
    check_affordable,
    check_probabilities,
    timeline,
    unroll,
)
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


# -- the finished plan, and checks of what the user brought ----------------------------------------


def request(**options):
    return Request(
        **{
            "topology": families.ring(4),
            "budget": 0.5,
            "strategy": "mine",
            "seed": 0,
            "mixing": "pairwise",
            "timing": Units(),
            **options,
        }
    )


def test_notes_warn_of_negative_weights_and_of_better_alternatives():
    ring = matcha.plan(families.ring(8), 0.5, "matcha")
    assert any("below zero" in note for note in ring.notes)
    assert any("periodic" in note for note in ring.notes)
    assert ring.smallest_self_weight < 0
    assert "below zero" in ring.summary()
    assert matcha.plan(families.path(2), 0.5, "matcha").notes == ()


def test_own_matchings_are_the_full_exchange():
    own = (((0, 1),), ((2, 3),), ((1, 2), (0, 3)))
    assert request(matchings=own).colors == own
    assert len(request().colors) == 2


def test_the_users_weight_takes_the_place_of_the_strategys():
    parts = {
        "schedule": Cycle(cycle=((0,), (1,)), num_matchings=2),
        "alpha": 0.5,
        "notes": ("found.",),
    }
    assert assemble_plan(request(), **parts).alpha == 0.5
    own = assemble_plan(request(alpha=0.25), **parts)
    assert own.alpha == 0.25
    assert own.notes == ("found.", "the mixing weight 0.25 is yours; 0.5 was found best.")


def test_what_is_beyond_the_budget_names_the_budget_that_would_do():
    check_affordable(request(), 1.0, 1.0, "the rounds")
    with pytest.raises(InputError, match=r"the rounds take 0\.75 .* give budget=0\.75"):
        check_affordable(request(), 1.5, 1.0, "the rounds")
    with pytest.raises(InputError, match="use less"):
        check_affordable(request(), 3.0, 1.0, "the rounds")


def test_probabilities_are_one_per_matching():
    matchings = request().colors
    assert check_probabilities([0.5, 0.25], matchings) == (0.5, 0.25)
    with pytest.raises(InputError, match="2 probabilities were given for 1 matchings"):
        check_probabilities((0.5, 0.25), matchings[:1])


# -- pacing ----------------------------------------------------------------------------------------


amounts = st.fractions(min_value=Fraction(1, 8), max_value=4, max_denominator=8)


@given(costs=st.lists(amounts, min_size=1, max_size=12), rate=amounts)
def test_nothing_is_spent_before_it_has_accrued(costs, rate):
    turns = timeline(costs, rate)
    assert [n for _, group in turns for n in group] == list(range(len(costs)))
    iterations, spent = 0, Fraction(0)
    for length, group in turns:
        assert length >= 1
        iterations += length
        spent += sum(costs[n] for n in group)
        assert spent <= iterations * rate
        assert spent > (iterations - 1) * rate  # and no later than it has


def test_a_turn_talks_at_its_end():
    assert unroll([(1, (0,)), (3, (1, 2))]) == ((0,), (), (), (1, 2))


def test_more_rounds_than_a_plan_can_store_are_refused():
    with pytest.raises(InputError, match="raise the budget, or use matcha or periodic"):
        unroll([(LONGEST_CYCLE + 1, (0,))])


@pytest.mark.parametrize("budget", [1e-9, 1e-12, 1e-300, 5e-324])
@pytest.mark.parametrize("strategy", ["greedy", "local", "hypercube", "base", "one-peer", "ceca"])
def test_a_budget_of_nearly_nothing_ends_in_a_sentence(strategy, budget):
    with pytest.raises(InputError, match="at this budget the plan repeats after"):
        matcha.plan(matcha.families.complete(8), budget, strategy)


@pytest.mark.parametrize("strategy", ["hypercube", "one-peer"])
def test_small_budgets_are_kept_and_not_rounded(strategy):
    plan = matcha.plan(matcha.families.complete(8), 7e-7, strategy)
    assert plan.expected_comm_time == pytest.approx(7e-7 * 7, rel=1e-4)
