"""The process of a plan's rounds: its checks, its figures, and what is left when workers go."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import matcha
from matcha import Plan, families, theory
from matcha.errors import InputError, PlanError
from matcha.rounds import RoundProcess
from matcha.schedules import Bernoulli, Choice, Cycle, EvenlySpaced
from matcha.strategies import Base

ER8 = families.paper("er8")
AUTHORS = families.paper_matchings("er8")
STRATEGIES = ("matcha", "vanilla", "periodic", "single", "greedy")
MATCHINGS = (((0, 1), (2, 3)), ((1, 2),))


@cache
def make(strategy: str, topology=None) -> matcha.Plan:
    budget = 1.0 if strategy == "vanilla" else 0.5
    return matcha.plan(topology or ER8, budget, strategy, seed=2)


def process(weights=None, mixing="pairwise", *, repeats=True):
    """Two matchings of a path of four, in turn or by coins."""
    drawn = Bernoulli(probabilities=(0.5, 0.5), seed=0)
    return RoundProcess(
        topology=families.path(4),
        matchings=MATCHINGS,
        schedule=Cycle(cycle=((0,), (1,)), num_matchings=2) if repeats else drawn,
        mixing=mixing,
        alpha=0.5,
        weights=weights,
    )


# -- parts ----------------------------------------------------------------------------------------


def test_the_seed_has_one_home(plan, tmp_path):
    """Before, replace(plan, seed=7) drew other rounds after save and load."""
    with pytest.raises(TypeError):
        replace(plan, seed=7)
    other = plan.with_process(schedule=replace(plan.schedule, seed=7))
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
    same = replace(plan.with_process(topology=renamed), budget=0.9, notes=())
    assert same.digest == plan.digest
    assert plan.with_process(alpha=math.nextafter(plan.alpha, 1)).digest != plan.digest


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Bernoulli(probabilities=(math.nan,), seed=0), r"in \[0, 1\]"),
        (lambda: Choice(probabilities=(math.nan,), seed=0), r"in \[0, 1\]"),
        (lambda: EvenlySpaced(frequency=math.nan, num_matchings=1), r"in \(0, 1\]"),
        (lambda: EvenlySpaced(frequency=0.0, num_matchings=1), r"in \(0, 1\]"),
        (lambda: Cycle(cycle=((0, 5),), num_matchings=5), "does not exist"),
        (lambda: Cycle(cycle=((-1,),), num_matchings=5), "does not exist"),
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
        ({"alpha": 1e30}, "weight"),
        ({"alpha": 0.0}, "weight"),
        ({"mixing": "shaken"}, "shaken"),
        ({"schedule": EvenlySpaced(frequency=1.0, num_matchings=2)}, "2 probabilities"),
        ({"matchings": AUTHORS[:4]}, "for 4 matchings"),
    ],
)
def test_plans_are_checked_where_they_are_made(change, message):
    plan = matcha.plan(ER8, 0.4, "periodic", matchings=AUTHORS)
    with pytest.raises(PlanError, match=message):
        plan.with_process(**change)


@pytest.mark.parametrize(
    ("change", "message"), [({"budget": math.nan}, "budget"), ({"num_colors": 0}, "colours")]
)
def test_so_is_what_stands_beside_the_rounds(plan, change, message):
    with pytest.raises(PlanError, match=message):
        replace(plan, **change)


# -- weights per link -----------------------------------------------------------------------------


def test_weights_that_fit_are_taken():
    for mixing, repeats in (("laplacian", False), ("pairwise", True), ("push", True)):
        weights = ((0.0, 1.0), (0.5,))
        made = process(weights, mixing, repeats=repeats)
        assert made.round_of((0, 1)).weights == weights
        with pytest.raises(PlanError, match="one value for each link"):
            process(((0.0, 1.0),), mixing, repeats=repeats)


@pytest.mark.parametrize(
    ("weights", "repeats", "message"),
    [
        (((0.5, 0.5), ()), True, "one value for each link"),
        (((0.5, 1.5), (0.5,)), True, r"in \[0, 1\]"),
        (((0.5, float("nan")), (0.5,)), True, r"in \[0, 1\]"),
        (((0.5, 0.5), (0.5,)), False, "rounds that repeat"),
    ],
)
def test_weights_that_do_not_are_refused(weights, repeats, message):
    with pytest.raises(PlanError, match=message):
        process(weights, repeats=repeats)


def test_links_that_are_left_keep_their_weights():
    left = process(((0.1, 0.2), (0.3,))).without(links=[(0, 1)])
    assert (left.matchings, left.weights) == ((((2, 3),), ((1, 2),)), ((0.2,), (0.3,)))
    assert left.without([1]).weights == ((0.2,), ())
    assert process().without([0]).weights is None


def test_a_summary_tells_the_weights():
    plan = make("periodic").with_process(alpha=0.125)
    assert "weight 0.1250" in plan.summary()
    own = matcha.plan(families.complete(3), 0.5, Base(mixing="pairwise"))
    every = [w for shares in own.weights for w in shares]
    assert f"weights {min(every):.2f} to {max(every):.2f}" in own.summary()


def test_alpha_is_not_changed_where_weights_per_link_stand_in_its_place():
    plan = matcha.plan(matcha.families.complete(3), 0.5, Base(mixing="pairwise"))
    assert plan.weights is not None
    with pytest.raises(PlanError, match="weights=None as well"):
        plan.with_process(alpha=0.4)
    own = plan.with_process(alpha=0.4, weights=None)
    assert own.digest != plan.digest
    assert own.round(len(own.schedule.cycle) - 1).weight == 0.4
    heavier = plan.with_process(alpha=0.4, weights=tuple((0.4,) * len(w) for w in plan.weights))
    assert heavier.mixing_matrix(0).tolist() == own.mixing_matrix(0).tolist()


def test_the_digest_is_of_the_rounds_alone():
    plan = matcha.plan(matcha.families.complete(3), 0.5, Base(mixing="pairwise"))
    document = plan.to_json() | {"alpha": 0.4}  # as a plan that another version wrote
    assert matcha.Plan.from_json(document).digest == plan.digest


# -- figures --------------------------------------------------------------------------------------


def test_figures_are_those_of_one_process_and_go_with_it():
    made = process().remember(rho=0.25)
    assert theory.contraction(made) == 0.25  # what is known is not computed again
    assert pickle.loads(pickle.dumps(made)).figures == {"rho": 0.25}
    for other in (replace(made, alpha=0.4), made.without([0])):
        assert theory.contraction(other) != 0.25
    assert made == process()  # figures are no part of what it is


def test_figures_follow_the_parts(plan):
    half = plan.with_process(alpha=plan.alpha / 2)
    assert half.rho == pytest.approx(theory.contraction(half.process))
    assert half.rho != pytest.approx(plan.rho)
    assert half.consensus_error == pytest.approx(theory.consensus_error(half.process))
    assert half.smallest_self_weight > plan.smallest_self_weight
    noted = replace(plan, notes=("hello",))
    assert (noted.rho, noted.consensus_error) == (plan.rho, plan.consensus_error)


def test_what_builders_found_is_what_the_parts_give(plan):
    bare = plan.with_process()  # knows nothing yet
    assert bare.rho == pytest.approx(plan.rho, abs=1e-9)
    assert bare.algebraic_connectivity == pytest.approx(plan.algebraic_connectivity, abs=1e-6)
    assert bare.consensus_error == pytest.approx(plan.consensus_error, rel=1e-6)


def test_large_plans_answer_too():
    topology = families.ring(600)
    plan = matcha.plan(topology, 0.3, "periodic")
    other = plan.with_process()  # knows nothing yet
    assert other.rho == pytest.approx(plan.rho, abs=1e-7)
    assert other.consensus_error is None


def test_the_least_own_weight_is_of_rounds_that_really_happen():
    """Before, matchings of probability 3e-10 made it −0.982."""
    plan = matcha.plan(matcha.families.paper("er8"), 0.5, "matcha")
    seen = min(np.diag(plan.mixing_matrix(k)).min() for k in range(5000))
    assert plan.smallest_self_weight == pytest.approx(seen, abs=1e-9)
    assert f"{seen:.3f}" in plan.notes[-1]


# -- when workers or links are gone ---------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_those_who_are_left_meet_as_before_and_the_average_is_kept(strategy, tmp_path) -> None:
    plan = make(strategy)
    left = plan.without([3, 1])
    cut = plan.without_links([plan.topology.links[0][::-1], plan.topology.links[5]])
    for k in range(60):
        links = [li for li in plan.round(k).links if not {1, 3} & set(li)]
        assert list(left.round(k).links) == links
        np.testing.assert_allclose(left.mixing_matrix(k).sum(0), 1.0)
        np.testing.assert_array_equal(left.mixing_matrix(k)[3], np.eye(8)[3])
        gone = {plan.topology.links[0], plan.topology.links[5]}
        assert list(cut.round(k).links) == [li for li in plan.round(k).links if li not in gone]
    assert left.digest == plan.without([1, 3]).digest != plan.digest
    assert plan.without([]) is plan
    left.save(tmp_path / "plan.json")
    assert matcha.Plan.load(tmp_path / "plan.json").digest == left.digest


def test_figures_are_of_those_who_are_left() -> None:
    plan = make("vanilla", families.complete(4))
    left = plan.without([0])
    W = left.mixing_matrix(0)[1:, 1:]
    expected = np.linalg.norm(W.T @ W - np.full((3, 3), 1 / 3), 2)
    assert left.rho == pytest.approx(expected)
    # One after another is the same as at once; it used to say that there is no consensus.
    twice = make("matcha").without([5]).without([3])
    assert twice.rho == make("matcha").without([3, 5]).rho < 1
    # Without its middle a path falls apart: each end goes on, but never to one value.
    path = make("vanilla", families.path(5)).without([2])
    assert path.rho == pytest.approx(1.0)


@settings(max_examples=8, deadline=None)
@given(gone=st.sets(st.integers(0, 7), max_size=6), k=st.integers(0, 10_000))
def test_leaving_out_in_any_order_is_the_same(gone, k) -> None:
    plan = make("matcha")
    at_once = plan.without(gone)
    one_by_one = plan
    for worker in sorted(gone, reverse=True):
        one_by_one = one_by_one.without([worker])
    assert at_once.digest == one_by_one.digest
    assert at_once.round(k).links == plan.round(k).without(gone).links


def test_staged_plans_are_left_in_every_stage() -> None:
    staged = matcha.staged_plan(families.ring(4), {0: 0.5, 10: 1.0}, strategy="periodic")
    left = staged.without([0])
    assert {w for k in range(20) for li in left.round(k).links for w in li} == {1, 2, 3}
    cut = staged.without_links([(0, 1)])
    assert all((0, 1) not in cut.round(k).links for k in range(20))


def test_what_is_not_there_cannot_be_left_out() -> None:
    plan = make("periodic")
    with pytest.raises(InputError, match="no worker 8 among 8"):
        plan.without([8])
    with pytest.raises(InputError, match="at least two workers"):
        plan.without(range(7))
    with pytest.raises(InputError, match="no link between workers 0 and 5"):
        plan.without_links([(0, 5)])
