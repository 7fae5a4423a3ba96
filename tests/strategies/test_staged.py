from __future__ import annotations

import pytest

import matcha
from matcha.errors import InputError

RING = matcha.families.ring(4)


def test_each_stage_has_the_rounds_of_its_own_plan():
    staged = matcha.staged_plan(RING, {0: 1.0, 10: 0.25}, strategy="periodic")
    first, second = (matcha.plan(RING, budget, "periodic") for budget in (1.0, 0.25))
    assert [staged.round(k).matchings for k in range(10)] == [
        first.round(k).matchings for k in range(10)
    ]
    assert sum(bool(staged.round(k).matchings) for k in range(10, 50)) == sum(
        bool(second.round(k).matchings) for k in range(40)
    )


def test_stages_on_demand_begin_at_the_poorest():
    staged = matcha.staged_plan(RING, [0.5, 0.1, 0.5], strategy="periodic", target=0.01)
    assert [level.budget for level in staged.levels] == [0.1, 0.5]
    assert staged.stages[0].level == 0


@pytest.mark.parametrize(("budgets", "target"), [([0.1, 0.5], None), ({0: 0.5}, 0.1)])
def test_a_target_goes_with_budgets_alone(budgets, target):
    with pytest.raises(InputError, match="or as budgets with a target"):
        matcha.staged_plan(RING, budgets, target=target)
