"""Plans of either kind: read as what they are, and offering all that engines ask of one."""

from __future__ import annotations

import copy
import json
import math
import pickle
import random

import numpy as np
import pytest

import matcha
from matcha import families
from matcha.errors import InputError, PlanError
from matcha.plans import StagedPlan, load_plan
from matcha.plans.staged import read_plan
from matcha.strategies import Base, Vanilla, staged_plan, strategy_with
from matcha.timing import all_reduce_time


@pytest.fixture(scope="module")
def staged():
    return staged_plan(families.ring(4), {0: 0.5, 40: 0.25}, "periodic")


def test_a_file_is_read_as_the_kind_of_plan_that_it_holds(staged, tmp_path):
    path = tmp_path / "staged.json"
    staged.save(path)
    again = load_plan(path)
    assert isinstance(again, StagedPlan)
    assert (again, again.digest) == (staged, staged.digest)
    staged.levels[0].save(tmp_path / "plain.json")
    plain = load_plan(tmp_path / "plain.json")
    assert isinstance(plain, matcha.Plan)
    assert plain == staged.levels[0]
    assert matcha.Plan.load(tmp_path / "plain.json") == plain
    with pytest.raises(PlanError, match=r"its schema is .matcha\.staged-plan"):
        matcha.Plan.load(path)
    with pytest.raises(PlanError, match="not a staged"):
        StagedPlan.from_json(plain.to_json())


def test_a_file_that_was_changed_is_refused(staged, tmp_path):
    path = tmp_path / "staged.json"
    staged.save(path)
    path.write_text(path.read_text().replace("40", "30"))
    with pytest.raises(PlanError, match="checksum"):
        load_plan(path)


def test_either_kind_has_all_that_engines_ask_for(staged):
    asked = "topology num_workers strategy budget seed timing wire matchings notes digest levels"
    asked += " level_at round rounds round_time mixing_matrix without summary to_json save"
    for plan in (staged, staged.levels[0]):
        assert [name for name in asked.split() if not hasattr(plan, name)] == []


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


# -- files that were changed -----------------------------------------------------------------------

ODD = [None, True, -1, 0, 0.5, 1e30, math.inf, math.nan, 10**400, "", "nan", [], [[]], {}, [[0, 0]]]


@pytest.fixture(scope="module")
def documents(staged):
    er8 = families.paper("er8")
    timed = er8.with_link_times([0.1] * len(er8.links))
    plans = [
        matcha.plan(er8, 0.3, strategy_with(s, effort="none"))
        for s in ("matcha", "greedy", "single")
    ]
    plans.append(matcha.plan(timed, 0.3, "periodic", wire="modulo:3"))
    plans.append(matcha.plan(families.complete(3), 0.5, Base(mixing="pairwise")))
    return [json.loads(json.dumps(plan.to_json())) for plan in (*plans, staged)]


def changed(document, rng):
    """A copy in which one part, anywhere, is gone or another value."""
    document = place = copy.deepcopy(document)
    while True:
        key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.25:
            break
        place = inner
    if rng.random() < 0.15:
        del place[key]
    else:
        place[key] = copy.deepcopy(rng.choice(ODD))
    return document


def test_a_changed_document_is_refused_in_a_sentence_or_is_a_plan(documents):
    rng, refused = random.Random(0), 0
    for _ in range(600):
        document = changed(rng.choice(documents), rng)
        try:
            plan = read_plan(document)
        except PlanError:
            refused += 1
            continue
        assert plan.summary()
        assert len(list(plan.rounds(0, 30))) == 30
        for level in plan.levels:
            assert 0 < level.alpha <= 1
            assert level.rho >= 0
    assert 300 < refused < 600


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rho", "nan", "rho is nan"),
        ("rho", 1.5, "not that of its rounds"),
        ("rho", -0.5, "never below 0"),
        ("consensus_error", "nan", "consensus_error is nan"),
        ("algebraic_connectivity", math.nan, "algebraic_connectivity is nan"),
        ("alpha", 1e30, r"must be in \(0, 1\]"),
        ("alpha", math.nan, r"must be in \(0, 1\]"),
        ("matchings", [[[0.5, 1]]], "malformed"),
        ("seed", 1.5, "malformed"),
        ("certificate", {"value": 1}, "malformed|lacks"),
    ],
)
def test_what_no_plan_can_promise_is_refused(documents, field, value, message, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(documents[0] | {field: value}))
    with pytest.raises(PlanError, match=message):
        load_plan(path)


def test_rounds_that_diverge_are_read_as_they_were_written(tmp_path):
    plan = matcha.plan(families.complete(8), 1.0, Vanilla(alpha=0.9))
    assert plan.rho > 1
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").rho == plan.rho


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"[" * 100_000, b"[1]", b"1e999"])
def test_what_is_no_document_is_refused(content, tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=r"plan\.json"):
        load_plan(path)
    with pytest.raises(PlanError, match="cannot be read"):
        load_plan(tmp_path)
