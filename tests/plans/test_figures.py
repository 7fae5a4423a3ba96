"""A plan's figures are those of its parts: kept with them, dropped with them."""

from __future__ import annotations

from dataclasses import replace

import pytest

import matcha
from matcha import families, theory
from matcha.plans import Figures


def test_figures_hold_for_the_parts_that_they_were_found_for():
    parts = (object(), 0.5)
    held = Figures(rho=0.25).held_for(parts)
    assert held.held_for(parts) is held
    # Equal is not the same: comparing topologies link by link would take long.
    other = held.held_for((object(), 0.5))
    assert other.rho is None
    assert held.rho == 0.25


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


def test_large_plans_answer_too():
    topology = families.ring(600)
    plan = matcha.plan(topology, 0.3, "periodic")
    other = replace(plan, figures=Figures())
    assert other.rho == pytest.approx(plan.rho, abs=1e-7)
    assert other.consensus_error is None
