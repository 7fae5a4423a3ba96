from __future__ import annotations

import pytest

import matcha
from matcha.errors import InputError
from matcha.plans import Stage
from matcha.plans.staged import MOST_STAGES
from matcha.strategies import Greedy, strategy_with
from matcha.strategies.staged import check_followable, is_off, next_stage

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


EQUAL = dict.fromkeys(RING.links, 0.2)
SLOW = EQUAL | {(0, 1): 2.0}


def test_stages_are_given_by_iteration():
    with pytest.raises(InputError, match="by iteration"):
        matcha.staged_plan(RING, [0.1, 0.5])


@pytest.mark.parametrize("wire", ["float32", "modulo:4"])
@pytest.mark.parametrize("strategy", ["matcha", "greedy", "single", "periodic"])
def test_a_slow_link_is_used_less_and_iterations_take_as_long_as_before(strategy, wire):
    plan = matcha.plan(RING, 0.2, strategy_with(strategy, effort="none"), wire=wire)
    longer = next_stage(plan, SLOW, 40)
    assert longer.levels[0] is plan
    assert longer.stages == (Stage(start=0, level=0), Stage(start=40, level=1))
    assert [longer.round(k) for k in range(40)] == [plan.round(k) for k in range(40)]
    before = 0.2 / plan.timing.matching_time(((0, 1),)) * plan.expected_comm_time
    assert longer.levels[1].expected_comm_time <= before * 1.01
    used = [sum((0, 1) in longer.round(k).links for k in range(s, s + 40)) for s in (0, 40)]
    assert used[1] < used[0]
    assert next_stage(plan, SLOW, 40).digest == longer.digest != plan.digest


def test_a_next_stage_starts_from_what_was_asked_for_first():
    plan = matcha.plan(RING, 0.5, Greedy(effort="none"))
    worse = next_stage(plan, SLOW, 40)
    better = next_stage(worse, EQUAL, 80)
    assert better.levels[2].budget == plan.budget
    assert better.levels[2].expected_comm_time == pytest.approx(0.2 * plan.expected_comm_time)


def test_many_stages_keep_the_first_and_the_last():
    staged = next_stage(matcha.plan(RING, 0.5, Greedy(effort="none")), SLOW, 10)
    level = staged.levels[1]
    for start in range(20, 10 * (MOST_STAGES + 5), 10):
        staged = staged.with_stage(start, level)
    assert len(staged.stages) == MOST_STAGES
    assert staged.stages[0] == Stage(start=0, level=0)
    assert staged.stages[-1].start == 10 * (MOST_STAGES + 4)
    assert staged.round(staged.stages[-1].start + 3).matchings == level.round(3).matchings


def test_only_how_links_compare_puts_a_plan_off():
    plan = matcha.plan(RING, 0.5, Greedy(effort="none"))
    assert not is_off(plan, EQUAL)
    assert not is_off(plan, EQUAL | {(0, 1): 0.29})
    assert is_off(plan, EQUAL | {(0, 1): 0.31})
    assert is_off(plan, EQUAL | {(0, 1): 0.1})
    # Used at most once in two iterations, 0.11 seconds more are at most 0.055 an iteration.
    assert is_off(plan, EQUAL | {(0, 1): 0.31}, least=0.01)
    assert not is_off(plan, EQUAL | {(0, 1): 0.31}, least=0.06)
    assert not is_off(plan, dict.fromkeys(RING.links, 77.0))


@pytest.mark.parametrize(
    ("plan", "complaint"),
    [
        (matcha.plan(RING, 1.0, "vanilla"), "cannot follow the network"),
        (matcha.plan(RING, 0.5, Greedy(mixing="push", effort="none")), "one way"),
        (matcha.staged_plan(RING, {0: 0.5}, "periodic"), "stages of its own"),
    ],
)
def test_what_cannot_follow_is_refused(plan, complaint):
    with pytest.raises(InputError, match=complaint):
        check_followable(plan)
