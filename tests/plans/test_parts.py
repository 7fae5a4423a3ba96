"""A plan cannot contradict itself: its figures are those of its parts, whatever was replaced."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace

import pytest

import matcha
from matcha import Plan, families, theory
from matcha.errors import InputError, PlanError
from matcha.plans import Figures
from matcha.schedules import Bernoulli, Choice, Cycle, Periodic

ER8 = families.paper("er8")
AUTHORS = families.paper_matchings("er8")
STRATEGIES = ("matcha", "vanilla", "periodic", "single", "greedy")


@pytest.fixture(scope="module", params=STRATEGIES)
def plan(request):
    return matcha.plan(ER8, 0.4, request.param, effort="none", seed=3)


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


def test_figures_follow_the_parts(plan):
    half = replace(plan, alpha=plan.alpha / 2)
    assert half.rho == pytest.approx(theory.contraction(half))
    assert half.rho != pytest.approx(plan.rho)
    assert half.consensus_error == pytest.approx(theory.consensus_error(half))
    assert half.smallest_self_weight > plan.smallest_self_weight
    noted = replace(plan, notes=("hello",))
    assert (noted.rho, noted.consensus_error) == (plan.rho, plan.consensus_error)


def test_what_builders_found_is_what_the_parts_give(plan):
    bare = replace(plan, figures=Figures())
    assert bare.rho == pytest.approx(plan.rho, abs=1e-9)
    assert bare.algebraic_connectivity == pytest.approx(plan.algebraic_connectivity, abs=1e-6)
    assert bare.consensus_error == pytest.approx(plan.consensus_error, rel=1e-6)


def test_one_ulp_of_a_figure_does_not_change_the_digest(plan):
    document = plan.to_json()
    for name in ("rho", "algebraic_connectivity", "expected_comm_time", "consensus_error"):
        document[name] = math.nextafter(document[name], 9.0)
    assert Plan.from_json(document).digest == plan.digest


def test_the_digest_is_of_the_rounds(plan):
    renamed = replace(plan.topology, name="another name", positions=None)
    assert replace(plan, topology=renamed, budget=0.9, notes=()).digest == plan.digest
    assert replace(plan, alpha=math.nextafter(plan.alpha, 1)).digest != plan.digest


def test_copies_and_pickles_are_the_same_plan(plan):
    plan.round(3)
    for other in (copy.copy(plan), copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert other == plan
        assert other.digest == plan.digest
        assert other.rho == plan.rho
        assert other.round(3) == plan.round(3)


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


def test_large_plans_answer_too():
    topology = families.ring(600)
    plan = matcha.plan(topology, 0.3, "periodic")
    other = replace(plan, figures=Figures())
    assert other.rho == pytest.approx(plan.rho, abs=1e-7)
    assert other.consensus_error is None
