"""Exact averages: what people run today, as strategies like others."""

from __future__ import annotations

import numpy as np
import pytest

import matcha
from matcha.timing import all_reduce_time

ER8 = matcha.families.paper("er8")


def test_allreduce_gives_everybody_the_mean_at_every_iteration():
    plan = matcha.plan(ER8, 0.1, "allreduce")
    x = np.arange(16.0).reshape(8, 2)
    mixed = plan.round(5).mix(x)
    assert np.allclose(mixed, x.mean(axis=0))
    assert plan.consensus_error == 0
    assert plan.expected_comm_time == pytest.approx(2 * 7 / 8)


@pytest.mark.parametrize("budget", [0.02, 0.1, 0.3])
def test_local_averages_as_often_as_the_budget_allows(budget):
    plan = matcha.plan(ER8, budget, "local")
    assert plan.expected_comm_time <= budget * 5 + 1e-12
    period = round(1 / plan.probabilities[0])
    talks = [k for k in range(3 * period) if plan.round(k)]
    assert talks == [period - 1, 2 * period - 1, 3 * period - 1]
    sooner = all_reduce_time(plan.timing, ER8) / (period - 1) if period > 1 else np.inf
    assert sooner > budget * 5


@pytest.mark.parametrize("strategy", ["allreduce", "local", "silent"])
def test_figures_are_what_theory_derives(strategy):
    plan = matcha.plan(ER8, 0.1, strategy)
    derived = plan.with_process(alpha=0.9 * plan.alpha)  # α plays no part, but figures are dropped
    assert "rho" not in derived.process.figures
    assert derived.rho == pytest.approx(plan.rho)
    assert derived.consensus_error == pytest.approx(plan.consensus_error)


@pytest.mark.parametrize("strategy", ["allreduce", "local", "silent"])
def test_they_are_saved_and_read_back(strategy, tmp_path):
    plan = matcha.plan(ER8, 0.1, strategy)
    plan.save(tmp_path / "plan.json")
    again = matcha.Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert again.consensus_error == plan.consensus_error
