from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from matcha.strategies.pacing import timeline, unrolled

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
    assert unrolled([(1, (0,)), (3, (1, 2))]) == ((0,), (), (), (1, 2))
