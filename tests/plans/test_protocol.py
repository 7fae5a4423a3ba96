"""What every kind of plan can do, whatever its rounds are."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import matcha
from matcha import families
from matcha.errors import InputError
from matcha.plans import all_reduce_time


def test_copies_and_pickles_are_the_same_plan(plan):
    plan.round(3)
    for other in (copy.copy(plan), copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert other == plan
        assert other.digest == plan.digest
        assert other.rho == plan.rho
        assert other.round(3) == plan.round(3)


@pytest.mark.parametrize("k", [-1, -2])
def test_no_round_comes_before_the_first(plan, k):
    """Before, rounds(-2) yielded rounds where round(-1) was refused."""
    for ask in (plan.round, plan.rounds, plan.mixing_matrix):
        with pytest.raises(InputError, match="count from 0"):
            ask(k)
    with pytest.raises(InputError, match="count from 0"):
        next(plan.schedule.actives(k, None))


def test_the_same_round_is_the_same_object(plan):
    rounds = list(plan.rounds(0, 300))
    assert len({id(round_) for round_ in rounds}) == len(set(rounds))


def test_the_mixing_matrix_and_the_time_are_the_rounds(plan):
    x = np.random.default_rng(0).normal(size=(plan.num_workers, 2))
    for k in (0, 7):
        round_ = plan.round(k)
        mixed = round_.mix(x) if round_ else x
        np.testing.assert_allclose(plan.mixing_matrix(k) @ x, mixed, atol=1e-14)
        assert plan.round_time(round_) == plan.timing.round_time(round_.matchings)
    assert str(plan) == plan.summary()


def test_an_exact_average_takes_the_time_of_an_all_reduce():
    plan = matcha.plan(families.ring(6), 0.5, "local")
    times = {plan.round_time(round_) for round_ in plan.rounds(0, 50)}
    assert times == {0.0, all_reduce_time(plan.timing, plan.topology)}
