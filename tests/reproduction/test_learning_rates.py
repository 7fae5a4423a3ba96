from __future__ import annotations

import math

import pytest

from reproduction.learning_rates import best_rate

LADDER = [0.05, 0.1, 0.2, 0.4, 0.8]


@pytest.mark.parametrize("best", LADDER)
def test_the_best_of_a_valley_is_found_wherever_it_is(best):
    assert best_rate(LADDER, lambda rate: abs(math.log(rate / best))) == best


def test_only_what_brackets_the_answer_is_tried():
    tried = []

    def loss(rate):
        tried.append(rate)
        return math.inf if rate > 0.2 else rate  # training fails above

    assert best_rate(LADDER, loss) == 0.05
    assert tried == [0.2, 0.4, 0.1, 0.05]


def test_one_rung_is_taken_as_it_is():
    tried = []
    assert best_rate([0.05], lambda rate: tried.append(rate) or 1.0) == 0.05
    assert tried == [0.05]


def test_when_every_training_fails_the_middle_is_kept():
    assert best_rate(LADDER, lambda rate: math.inf) == 0.2
