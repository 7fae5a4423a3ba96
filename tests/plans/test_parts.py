"""A plan cannot contradict itself: its figures are those of its parts, whatever was replaced."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

import matcha
from matcha import Plan, families
from matcha.errors import PlanError
from matcha.schedules import Bernoulli, Choice, Cycle, Periodic

ER8 = families.paper("er8")
AUTHORS = families.paper_matchings("er8")


def test_the_seed_has_one_home(plan, tmp_path):
    """Before, replace(plan, seed=7) drew other rounds after save and load."""
    with pytest.raises(TypeError):
        replace(plan, seed=7)
    other = replace(plan, schedule=replace(plan.schedule, seed=7))
    assert other.seed == 7
    other.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert [again.round(k) for k in range(200)] == [other.round(k) for k in range(200)]
    drawn = plan.schedule.period is None
    assert (other.digest != plan.digest) == drawn
    assert ([other.round(k) for k in range(200)] != [plan.round(k) for k in range(200)]) == drawn


def test_one_ulp_of_a_figure_does_not_change_the_digest(plan):
    document = plan.to_json()
    for name in ("rho", "algebraic_connectivity", "expected_comm_time", "consensus_error"):
        document[name] = math.nextafter(document[name], 9.0)
    assert Plan.from_json(document).digest == plan.digest


def test_the_digest_is_of_the_rounds(plan):
    renamed = replace(plan.topology, name="another name", positions=None)
    assert replace(plan, topology=renamed, budget=0.9, notes=()).digest == plan.digest
    assert replace(plan, alpha=math.nextafter(plan.alpha, 1)).digest != plan.digest


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Bernoulli(probabilities=(math.nan,), seed=0), r"in \[0, 1\]"),
        (lambda: Choice(probabilities=(math.nan,), seed=0), r"in \[0, 1\]"),
        (lambda: Periodic(frequency=math.nan, num_matchings=1), r"in \(0, 1\]"),
        (lambda: Periodic(frequency=0.0, num_matchings=1), r"in \(0, 1\]"),
        (lambda: Cycle(cycle=((0, 5),), num_matchings=5), "not there"),
        (lambda: Cycle(cycle=((-1,),), num_matchings=5), "not there"),
        (lambda: Cycle(cycle=((0,),), num_matchings=5, seed=-1), "seed"),
    ],
)
def test_schedules_are_checked_where_they_are_made(make, message):
    with pytest.raises(PlanError, match=message):
        make()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alpha": math.nan}, "weight"),
        ({"alpha": math.inf}, "weight"),
        ({"budget": math.nan}, "budget"),
        ({"num_colors": 0}, "colours"),
        ({"mixing": "shaken"}, "shaken"),
        ({"schedule": Periodic(frequency=1.0, num_matchings=2)}, "2 probabilities"),
        ({"matchings": AUTHORS[:4]}, "for 4 matchings"),
    ],
)
def test_plans_are_checked_where_they_are_made(change, message):
    plan = matcha.plan(ER8, 0.4, "periodic", matchings=AUTHORS)
    with pytest.raises(PlanError, match=message):
        replace(plan, **change)
