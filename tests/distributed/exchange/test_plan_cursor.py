from __future__ import annotations

import matcha
from matcha.distributed.exchange.meeting import PlanCursor, meetings
from matcha.plans.staged import Stage
from matcha.strategies import Matcha

PLAN = matcha.plan(matcha.families.ring(4), 0.5, Matcha(effort="none"))


def test_a_worker_comes_through_the_plan_round_by_round():
    way = PlanCursor(PLAN, rank=2, iteration=0)
    for k in range(30):
        assert (way.iteration, way.round) == (k, PLAN.round(k))
        assert way.met == meetings(PLAN.round(k), 2)
        way.advance()


def test_any_iteration_is_reached_at_once():
    way = PlanCursor(PLAN, rank=0, iteration=7)
    assert way.round == PLAN.round(7)
    way.seek(1_000_000)
    assert (way.iteration, way.round) == (1_000_000, PLAN.round(1_000_000))
    way.seek(3)
    assert way.round == PLAN.round(3)


def test_a_worker_alone_meets_nobody():
    way = PlanCursor(PLAN, rank=0, iteration=0, alone=True)
    for _ in range(10):
        assert way.met == ()
        way.advance()
    assert way.iteration == 10


def test_partners_are_those_whom_the_rounds_to_come_can_pair():
    greedy = matcha.plan(matcha.families.complete(4), 0.5, "greedy")
    met = {m.peer for k in range(50) for m in meetings(greedy.round(k), 0)}
    assert PlanCursor(greedy, rank=0, iteration=0).partners() == met < {1, 2, 3}
    silent = matcha.plan(matcha.families.ring(4), 0.5, "silent")
    stages = (Stage(start=0, level=1), Stage(start=10, level=0))
    staged = matcha.StagedPlan(levels=(silent, PLAN), stages=stages)
    way = PlanCursor(staged, rank=0, iteration=9)
    assert way.partners() == {1, 3}
    way.advance()
    assert way.partners() == set()
