from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import matcha
from matcha.errors import InputError

STRATEGIES = ("matcha", "vanilla", "periodic", "single", "greedy")


@cache
def make(strategy: str, topology=None) -> matcha.Plan:
    budget = 1.0 if strategy == "vanilla" else 0.5
    return matcha.plan(topology or matcha.families.paper("er8"), budget, strategy, seed=2)


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
    plan = make("vanilla", matcha.families.complete(4))
    left = plan.without([0])
    W = left.mixing_matrix(0)[1:, 1:]
    expected = np.linalg.norm(W.T @ W - np.full((3, 3), 1 / 3), 2)
    assert left.rho == pytest.approx(expected)
    # Without its middle a path falls apart: each end goes on, but never to one value.
    path = make("vanilla", matcha.families.path(5)).without([2])
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
    staged = matcha.staged_plan(matcha.families.ring(4), {0: 0.5, 10: 1.0}, strategy="periodic")
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
