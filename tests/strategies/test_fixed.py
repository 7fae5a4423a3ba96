"""Strategies with a fixed schedule: all links, exact averages, silence."""

from __future__ import annotations

import math

import numpy as np
import pytest

import matcha
from matcha import Plan, Topology
from matcha.strategies import COMPARED, AllReduce, Local, is_control
from matcha.timing import all_reduce_time

ER8 = matcha.families.paper("er8")


@pytest.mark.parametrize("name", ["er8", "geometric16-d10"])
def test_vanilla_talks_over_all_links_at_every_iteration_whatever_the_budget(name):
    topology = matcha.families.paper(name)
    plan = matcha.plan(topology, 0.3, "vanilla")
    assert plan.budget == 1.0
    for k in (0, 1, 12_345):
        links = [link for matching in plan.round(k).matchings for link in matching]
        assert sorted(links) == sorted(topology.links)


def test_vanillas_weight_is_the_best_constant_one():
    topology = ER8
    plan = matcha.plan(topology, 1.0, "vanilla")
    spectrum = np.linalg.eigvalsh(topology.laplacian().toarray())
    assert plan.alpha == pytest.approx(2 / (spectrum[1] + spectrum[-1]))
    assert plan.rho == pytest.approx((1 - plan.alpha * spectrum[1]) ** 2)
    assert plan.rho == pytest.approx(0.6538, abs=5e-5)


@pytest.mark.parametrize("budget", [0.1, 0.25, 0.4, 1.0])
def test_all_links_or_none_in_a_share_of_the_iterations(budget):
    topology = matcha.families.ring(5)
    plan = matcha.plan(topology, budget, "periodic")
    sizes = [sum(map(len, plan.round(k).matchings)) for k in range(1000)]
    assert set(sizes) <= {0, len(topology.links)}
    assert sum(map(bool, sizes)) == pytest.approx(1000 * budget, abs=1)


def test_periodic_has_the_papers_figure():
    plan = matcha.plan(ER8, 0.5, "periodic")
    assert plan.rho == pytest.approx(0.8269, abs=5e-5)


def test_allreduce_gives_everybody_the_mean_at_every_iteration():
    plan = matcha.plan(ER8, 0.1, "allreduce")
    x = np.arange(16.0).reshape(8, 2)
    mixed = plan.round(5).mix(x)
    assert np.allclose(mixed, x.mean(axis=0))
    assert plan.consensus_error == 0
    assert plan.expected_comm_time == pytest.approx(2 * 2 * 7 / 8)  # er8 has no ring
    assert "ring all-reduce on paper:er8" in plan.notes[0]


def test_behind_a_switch_any_two_workers_are_one_exchange_apart():
    assert matcha.plan(ER8, 0.1, AllReduce(switch=True)).expected_comm_time == pytest.approx(1.75)
    assert matcha.plan("star:8", 0.1, AllReduce(switch=True)).budget == pytest.approx(1.75 / 7)
    often, rarely = (matcha.plan(ER8, 0.1, Local(switch=s)) for s in (True, False))
    assert (often.probabilities[0], rarely.probabilities[0]) == (
        1 / 4,
        1 / 7,
    )  # 1.75 and 3.5 of 0.5
    # Over its best link: a worker with a slow and a quick one has the quick one's card.
    slow = Topology.from_links([(0, 1), (1, 2), (0, 2)], link_times=[1.0, 9.0, 2.0])
    plan = matcha.plan(slow, 1.0, AllReduce(switch=True))
    assert plan.expected_comm_time == pytest.approx(4 / 3 * 2.0)
    assert Plan.from_json(plan.to_json()).expected_comm_time == plan.expected_comm_time


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


def test_silent_workers_never_talk():
    plan = matcha.plan(matcha.families.ring(5), 0.5, "silent")
    assert not any(plan.rounds(0, 100))
    assert plan.expected_comm_time == 0
    assert plan.rho == 1
    assert math.isinf(plan.consensus_error)
    assert plan.budget == 0


def test_silence_is_compared_and_can_win_nothing():
    assert {"silent", "allreduce", "local"} <= set(COMPARED)
    assert [name for name in COMPARED if is_control(name)] == ["silent"]
