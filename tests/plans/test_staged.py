"""Staged plans: the members of a plan, stages by schedule and on demand, files."""

import math

import numpy as np
import pytest

import matcha
from matcha import families
from matcha.errors import InputError, PlanError
from matcha.plans import Stage, StagedPlan
from matcha.strategies import staged_plan

TOPOLOGY = families.paper("er8")


@pytest.fixture(scope="module")
def fixed():
    return staged_plan(TOPOLOGY, {0: 0.5, 40: 0.1, 100: 0.5}, "greedy", effort="none")


@pytest.fixture(scope="module")
def adaptive():
    return staged_plan(TOPOLOGY, [0.5, 0.05, 0.2], "matcha", target=1.0, effort="none")


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


def test_on_demand_all_workers_take_the_same_turn(adaptive):
    assert [level.budget for level in adaptive.levels] == [0.05, 0.2, 0.5]
    more = adaptive.next_stage(100, 3.0)
    assert more.stages[-1] == Stage(start=100, level=1)
    # What is past does not change, and the same numbers give the same plan.
    assert [more.round(k) for k in range(100)] == [adaptive.round(k) for k in range(100)]
    assert adaptive.next_stage(100, 3.0).digest == more.digest != adaptive.digest
    assert more.next_stage(200, 0.5) is more
    assert more.next_stage(200, 0.1).stages[-1].level == 0
    assert more.next_stage(200, math.nan).stages[-1].level == 2
    top = more.next_stage(200, 9.0)
    assert top.next_stage(300, 9.0) is top
    # Asked again at the same checkpoint, the last answer counts.
    assert top.next_stage(200, 0.1).stages == (*more.stages, Stage(start=200, level=1))
    with pytest.raises(InputError, match="before the last stage"):
        top.next_stage(150, 1.0)


def test_on_demand_holds_the_target():
    plan = staged_plan(TOPOLOGY, [0.02, 0.1, 0.3, 0.6], "greedy", target=1.0, effort="none")
    rng = np.random.default_rng(0)
    x = np.zeros((8, 400))
    distances = []
    for k in range(1500):
        x = plan.round(k).mix(x + rng.standard_normal(x.shape))
        if k % 50 == 49:
            distance = float(np.square(x - x.mean(axis=0)).sum()) / 8 / 400
            plan = plan.next_stage(k + 1, distance)
            distances.append(distance)
    # 0.1 leaves 2.5 and 0.3 leaves 0.55: it finds its way to where the target is held.
    assert np.mean(distances[-10:]) < 1.3
    assert distances[0] > 2


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"stages": (Stage(start=5, level=0),)}, "start at 0"),
        ({"stages": (Stage(start=0, level=7),)}, "level 7"),
        ({"stages": ()}, "a level and a stage"),
        ({"target": -1.0}, "positive"),
    ],
)
def test_nonsense_is_refused(fixed, change, complaint):
    parts = {"levels": fixed.levels, "stages": fixed.stages, "target": None} | change
    with pytest.raises(PlanError, match=complaint):
        StagedPlan(**parts)


def test_levels_share_topology_and_options_agree(fixed):
    other = matcha.plan(families.ring(8), 0.5, "periodic")
    with pytest.raises(PlanError, match="one topology"):
        StagedPlan(levels=(fixed.levels[0], other), stages=fixed.stages)
    with pytest.raises(InputError, match="with a target"):
        staged_plan(TOPOLOGY, [0.1, 0.5])
    with pytest.raises(InputError, match="no target"):
        fixed.next_stage(200, 1.0)


def test_a_plan_on_demand_says_that_someone_must_ask():
    staged = staged_plan(families.ring(4), [0.25, 0.5], strategy="periodic", target=0.1)
    assert any("next_stage chooses among budgets 0.25, 0.5" in note for note in staged.notes)
