from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

import matcha
from matcha.errors import InputError
from matcha.strategies.parts import LONGEST_CYCLE, timeline, unroll

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
