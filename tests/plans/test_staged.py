"""Staged plans: the members of a plan, stages by schedule and added later, files."""

import numpy as np
import pytest

import matcha
from matcha import families
from matcha.errors import InputError, PlanError
from matcha.plans import Stage, StagedPlan, check_plan
from matcha.strategies import Greedy, staged_plan

TOPOLOGY = families.paper("er8")


@pytest.fixture(scope="module")
def fixed():
    return staged_plan(TOPOLOGY, {0: 0.5, 40: 0.1, 100: 0.5}, Greedy(effort="none"))


def test_rounds_are_those_of_the_stage_in_force(fixed):
    poor, rich = fixed.levels
    assert (poor.budget, rich.budget) == (0.1, 0.5)
    for k, (level, start) in {
        0: (rich, 0),
        39: (rich, 0),
        40: (poor, 40),
        77: (poor, 40),
        130: (rich, 100),
    }.items():
        assert fixed.round(k).matchings == level.round(k - start).matchings
        assert fixed.round(k).weight == level.alpha
    in_order = list(fixed.rounds(30, 120))
    assert in_order == [fixed.round(k) for k in range(30, 120)]
    for round_ in in_order:
        assert tuple(fixed.matchings[j] for j in round_.indices) == round_.matchings
    with pytest.raises(InputError, match="count from 0"):
        fixed.round(-1)


def test_a_stage_counts_its_iterations_from_its_start():
    """Also where its start is no multiple of its period."""
    staged = staged_plan(families.ring(4), {0: 1.0, 3: 0.25, 10: 0.25}, "periodic")
    talks = [bool(staged.round(k)) for k in range(18)]
    quarter = [bool(staged.level_at(3).round(k)) for k in range(8)]
    assert quarter.count(True) == 2
    assert talks == [True] * 3 + quarter[:7] + quarter
    assert [staged.round(k) for k in range(18)] == list(staged.rounds(0, 18))


def test_it_offers_what_engines_use(fixed):
    assert fixed.num_workers == 8
    assert fixed.topology == TOPOLOGY
    assert fixed.strategy == "greedy"
    assert (fixed.budget, fixed.seed) == (0.5, 0)
    assert fixed.round_time(fixed.round(41)) in (0.0, 1.0)
    assert np.allclose(fixed.mixing_matrix(3).sum(axis=0), 1)
    assert [fixed.level_at(k).budget for k in (39, 40, 100)] == [0.5, 0.1, 0.5]
    assert fixed.levels[0].levels == (fixed.levels[0],)
    assert fixed.levels[0].level_at(99) is fixed.levels[0]
    for k in (-1, -7):
        with pytest.raises(InputError, match="count from 0"):
            fixed.rounds(k)
    assert "from iteration 40: budget 0.1" in str(fixed)
    assert len(fixed.notes) >= 2


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"stages": (Stage(start=5, level=0),)}, "start at 0"),
        ({"stages": (Stage(start=0, level=7),)}, "level 7"),
        ({"stages": ()}, "a level and a stage"),
    ],
)
def test_nonsense_is_refused(fixed, change, complaint):
    parts = {"levels": fixed.levels, "stages": fixed.stages} | change
    with pytest.raises(PlanError, match=complaint):
        StagedPlan(**parts)


def test_levels_share_topology_and_options_agree(fixed):
    other = matcha.plan(families.ring(8), 0.5, "periodic")
    with pytest.raises(PlanError, match="one topology"):
        StagedPlan(levels=(fixed.levels[0], other), stages=fixed.stages)
    small = matcha.plan(TOPOLOGY, 0.5, "periodic", wire="bfloat16")
    with pytest.raises(PlanError, match="one wire"):
        StagedPlan(levels=(fixed.levels[0], small), stages=fixed.stages)


def test_a_file_of_0_1_with_a_target_keeps_its_stages(fixed):
    old = fixed.to_json() | {"schema": "matcha.staged-plan/1", "target": 0.5}
    assert StagedPlan.from_json(old).digest == fixed.digest


def test_a_stage_is_added_at_the_end(fixed):
    longer = fixed.with_stage(300, fixed.levels[0])
    assert longer.level_at(300) is fixed.levels[0]
    assert longer.round(307).matchings == fixed.levels[0].round(7).matchings
    with pytest.raises(PlanError, match="go up"):
        fixed.with_stage(50, fixed.levels[0])


@pytest.mark.parametrize(
    ("given", "words"),
    [("plan.json", r"matcha.load_plan\('plan.json'\)"), ("ring:4", r"matcha.plan\('ring:4'\)")],
)
def test_a_name_in_place_of_a_plan_says_what_makes_one(given, words):
    with pytest.raises(PlanError, match=words):
        check_plan(given)
