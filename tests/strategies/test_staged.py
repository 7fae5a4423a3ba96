from __future__ import annotations

import numpy as np
import pytest

import matcha
from matcha import families
from matcha.errors import InputError
from matcha.plans import Events, Plan, Stage, StagedPlan
from matcha.plans.staged import MOST_STAGES
from matcha.strategies import Greedy, next_stage, strategy_with, with_events, with_workers
from matcha.strategies.planning import check_followable, is_off

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


# -- workers join and leave ------------------------------------------------------------------------


@pytest.mark.parametrize("wire", ["float32", "modulo:4"])
@pytest.mark.parametrize("strategy", ["greedy", "matcha", "vanilla", "periodic"])
def test_workers_join_and_leave(strategy, wire):
    plan = matcha.plan(families.ring(6), 0.5, strategy, wire=wire)
    made = with_workers(plan, {6: [0, 3], 7: [6, 2]}, left=[1])
    assert made.members == (0, 2, 3, 4, 5, 6, 7)
    assert made.num_workers == 8
    assert made.wire == plan.wire
    assert made.strategy == strategy
    assert made.expected_comm_time == pytest.approx(plan.expected_comm_time, rel=0.5)
    used = {link for k in range(200) for link in made.round(k).links}
    assert used
    assert all(set(link) <= set(made.members) for link in used)
    assert made.rho < 1
    again = Plan.from_json(made.to_json())
    assert (again.digest, again.members, again.rho) == (made.digest, made.members, made.rho)
    x = np.random.default_rng(0).normal(size=(8, 3))
    mixed = made.round(0).mix(x)
    np.testing.assert_allclose(mixed.mean(0), x.mean(0))
    np.testing.assert_array_equal(mixed[1], x[1])


def test_it_is_the_same_wherever_it_is_made():
    plan = matcha.plan(families.ring(6), 0.5)
    one = with_workers(Plan.from_json(plan.to_json()), {6: [0, 3]})
    assert one.digest == with_workers(plan, {6: (3, 0)}).digest


def test_those_left_stay_joined():
    star = matcha.plan(families.star(5), 0.5)
    left = with_workers(star, {}, left=[0])
    assert left.members == (1, 2, 3, 4)
    assert left.rho < 1


def test_numbers_may_be_left_out_and_taken_later():
    plan = matcha.plan(families.ring(4), 0.5)
    later = with_workers(plan, {6: [1]})
    assert later.members == (0, 1, 2, 3, 6)
    full = with_workers(later, {5: [6, 2], 4: [0]})
    assert full.members == tuple(range(7))
    back = with_workers(with_workers(full, {}, left=[5]), {5: [0]})
    assert back.members == full.members


def test_seconds_are_planned_with():
    topology = families.ring(4).with_link_times([0.1] * 4)
    made = with_workers(matcha.plan(topology, 0.5), {4: {0: 5.0, 2: 0.1}})
    assert made.topology.link_times is not None
    slow, quick = (
        sum(link in made.round(k).links for k in range(400)) for link in ((0, 4), (2, 4))
    )
    assert slow < quick
    stage = next_stage(made, dict.fromkeys(made.topology.links, 0.2), 50)
    assert stage.level_at(60).members == made.members


@pytest.mark.parametrize(
    ("joined", "left", "message"),
    [
        ({2: [0]}, [], "worker 2 cannot join: it is there already"),
        ({4: [9]}, [], "needs a link to a worker there"),
        ({4: [0, 9]}, [], "with a link to worker 9"),
        ({4: []}, [], "needs a link"),
        ({4: [3]}, [3], "needs a link"),
        ({}, [7], "worker 7 cannot leave"),
        ({}, [1, 2, 3], "at least two workers"),
    ],
)
def test_refusals(joined, left, message):
    with pytest.raises(InputError, match=message):
        with_workers(matcha.plan(families.ring(4), 0.5), joined, left)


def test_some_plans_cannot_be_made_again():
    for strategy in ("hypercube", "ceca"):
        plan = matcha.plan(families.parse("complete:4"), 0.5, strategy)
        with pytest.raises(InputError):
            with_workers(plan, {4: [0]})


def test_events_become_stages_once():
    plan = matcha.plan(families.ring(4), 0.5)
    events = Events.from_json(
        [
            {"at": 30, "join": {"worker": 4, "links": [1, 3]}},
            {"at": 30, "join": {"worker": 5, "links": [4]}},
            {"at": 60, "leave": 0},
        ]
    )
    staged = with_events(plan, events)
    assert isinstance(staged, StagedPlan)
    assert [stage.start for stage in staged.stages] == [0, 30, 60]
    assert [sorted(events.gone(k)) for k in (0, 29, 30, 60)] == [[4, 5], [4, 5], [], [0]]
    assert with_events(staged, events).digest == staged.digest
    assert StagedPlan.from_json(staged.to_json()).digest == staged.digest
    assert events.changes(0, 99) == [[30, 4, 1], [30, 5, 1], [60, 0, 0]]


def test_no_change_of_members_is_forgotten():
    plan = with_events(
        matcha.plan(families.ring(4), 0.5, "periodic"),
        Events.from_json([{"at": 7, "join": {"worker": 4, "links": [1]}}]),
    )
    assert isinstance(plan, StagedPlan)
    before = plan.steps_before(7)
    for start in range(10, 60):
        plan = plan.with_stage(start, plan.levels[-1])
    assert plan.steps_before(7) == before
    assert len(plan.stages) <= 32
    assert plan.steps_before(20) == 7 * 4 + 13 * 5
