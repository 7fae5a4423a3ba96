"""The registry: what every strategy says of itself, and what is said of a user's own."""

from __future__ import annotations

import numpy as np
import pytest

import matcha
from matcha import families
from matcha.errors import InputError
from matcha.strategies import (
    OFFERED,
    STRATEGIES,
    Greedy,
    Matcha,
    Vanilla,
    has_budget,
    is_control,
    make_strategy,
    strategy_named,
    strategy_with,
)


def test_every_strategy_says_all_that_others_need():
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
        plan = matcha.plan(topology, 0.5, strategy_with(name, effort="none"))
        assert plan.strategy == name
        assert plan.mixing in STRATEGIES[name].mixings


def test_a_strategy_of_ones_own_has_a_budget():
    assert has_budget("mine")
    assert not is_control("mine")


def test_all_reduces_and_silence_have_no_wire_to_choose():
    wireless = {name for name, strategy in STRATEGIES.items() if not strategy.takes_wire}
    assert wireless == {"allreduce", "silent", "relaysum"}
    er8, cube = families.paper("er8"), families.hypercube(3)
    asked = ["float32", "modulo:3"]
    assert STRATEGIES["local"]().wires(asked, er8) == ["float32"]  # whose links do not suffice
    assert STRATEGIES["local"]().wires(asked, cube) == asked
    assert STRATEGIES["sparseloco"]().wires(asked, cube) == ["topk:64"]


def test_options_are_those_that_a_strategy_takes():
    assert make_strategy("greedy", effort="high") == Greedy(effort="high")
    assert strategy_with("vanilla", effort="high", alpha=0.1) == Vanilla(alpha=0.1)
    with pytest.raises(InputError, match="takes no decomposition: leave it out, or use matcha"):
        make_strategy("greedy", decomposition="links")
    for wrong in ({"effort": "lots"}, {"mixing": "laplacian"}, {"alpha": 2}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            Greedy(**wrong)


def test_the_default_is_greedy_and_matcha_where_matchings_are_given():
    topology, budgets = families.ring(4), {0: 0.5, 10: 0.25}
    matchings = [[(0, 1), (2, 3)], [(1, 2), (0, 3)]]
    assert matcha.plan(topology, 0.5) == matcha.plan(topology, 0.5, Greedy())
    own = matcha.plan(topology, 0.5, matchings=matchings)
    assert own == matcha.plan(topology, 0.5, Matcha(), matchings=matchings)
    assert matcha.staged_plan(topology, budgets).strategy == "greedy"


def test_a_class_instead_of_a_strategy_says_what_to_write():
    with pytest.raises(InputError, match=r"make one of it, Greedy\(\)"):
        matcha.plan(families.ring(4), 0.5, Greedy)
