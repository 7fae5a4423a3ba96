"""The registry: what every strategy says of itself, and what is said of a user's own."""

from __future__ import annotations

import numpy as np
import pytest

import matcha
from matcha import families
from matcha.errors import InputError
from matcha.strategies import OFFERED, STRATEGIES, has_budget, is_control, look_of, strategy_named


def test_every_strategy_says_all_that_others_need():
    assert len({strategy.color for strategy in STRATEGIES.values()}) == len(STRATEGIES)
    assert len({strategy.marker for strategy in STRATEGIES.values()}) == len(STRATEGIES)
    for name, strategy in STRATEGIES.items():
        assert strategy_named(name) is strategy
        assert strategy.about
        assert strategy.budgets([0.5, 0.1]) == ([0.1, 0.5] if strategy.has_budget else [1.0])
    with pytest.raises(InputError, match="did you mean 'greedy'"):
        strategy_named("gredy")


def test_sweeps_plan_a_strategy_without_a_budget_once():
    points = matcha.sweep(families.ring(4), budgets=[0.5, 1.0], strategies=["vanilla", "periodic"])
    assert [point.strategy for point in points] == ["vanilla", "periodic", "periodic"]
    np.testing.assert_allclose([point.budget for point in points], [1.0, 0.5, 1.0])


def test_what_can_be_asked_for_by_name_alone_makes_a_plan():
    assert set(STRATEGIES) - set(OFFERED) == {"rounds"}
    topology = families.complete(4)
    for name in OFFERED:
        plan = matcha.plan(topology, 0.5, name, effort="none")
        assert plan.strategy == name
        assert plan.mixing in STRATEGIES[name].mixings


def test_a_strategy_of_ones_own_is_drawn_and_has_a_budget():
    assert look_of("mine") not in [look_of(name) for name in STRATEGIES]
    assert has_budget("mine")
    assert not is_control("mine")


def test_exact_averages_and_silence_have_no_wire_to_choose():
    wireless = {name for name, strategy in STRATEGIES.items() if not strategy.takes_wire}
    assert wireless == {"allreduce", "local", "silent"}
