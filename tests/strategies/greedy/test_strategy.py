"""The greedy strategy: better than matcha, within budget, fair, exact and sketched alike."""

import dataclasses
import math

import numpy as np
import pytest
from benchmarks.parts.supports import doubling_bound
from hypothesis import given, settings
from hypothesis import strategies as st

import matcha
from matcha import families, theory
from matcha.errors import InputError
from matcha.matchings import decompose, is_matching
from matcha.schedules import Cycle
from matcha.strategies import Greedy, Matcha
from matcha.theory import cycles
from matcha.timing import RandomLinks, Scaled

# DESIGN.md section 5: (C_b, graph) -> consensus error of a first greedy prototype.
DESIGN = {
    (0.1, "er8"): 2.49,
    (0.1, "geometric16-d5"): 6.03,
    (0.1, "geometric16-d10"): 1.13,
    (0.1, "geometric16-d13"): 0.515,
    (0.1, "er16"): 1.37,
    (0.3, "er8"): 0.55,
    (0.3, "geometric16-d5"): 1.47,
    (0.3, "geometric16-d10"): 0.18,
    (0.3, "geometric16-d13"): 0.026,
    (0.3, "er16"): 0.23,
}


def steps_of(plan):
    return cycles.turns_of(
        [cycles.step(matching) for matching in round_.matchings] for round_ in cycle_of(plan)
    )


def cycle_of(plan):
    return list(plan.rounds(0, len(plan.schedule.cycle)))


@pytest.mark.parametrize(("budget", "name"), DESIGN)
def test_as_good_as_the_design_says(budget, name):
    plan = matcha.plan(families.paper(name), budget, "greedy")
    assert plan.consensus_error <= DESIGN[budget, name]
    # The report is the exact steady state of what the rounds really do.
    assert plan.consensus_error == pytest.approx(theory.consensus_error(plan.process), rel=1e-9)
    assert plan.expected_comm_time <= budget * plan.num_colors + 1e-12
    assert plan.mixing == "pairwise"
    assert isinstance(plan.schedule, Cycle)
    # A weight for each link: never worse than one for all.
    assert plan.consensus_error <= plan.with_process(weights=None).consensus_error


@pytest.mark.parametrize("name", ["ring:16", "star:16", "torus:4x4", "barbell:16", "path:5"])
@pytest.mark.parametrize("budget", [0.02, 0.5])
def test_never_worse_than_matcha(name, budget):
    topology = families.parse(name)
    ours = matcha.plan(topology, budget, "greedy")
    paper = matcha.plan(topology, budget, Matcha(alpha="error"))
    assert ours.consensus_error <= paper.consensus_error


@settings(max_examples=15, deadline=None)
@given(
    num_workers=st.integers(2, 10),
    density=st.floats(0.2, 1.0),
    seed=st.integers(0, 10**6),
    budget=st.sampled_from([0.003, 0.05, 0.25, 1 / 3, 0.7, 1.0]),
)
def test_every_connected_graph_and_budget_reaches_consensus(num_workers, density, seed, budget):
    topology = (
        families.erdos_renyi(num_workers, max(density, 3 / num_workers), seed)
        if (num_workers > 3)
        else families.path(num_workers)
    )
    plan = matcha.plan(topology, budget, Greedy(effort="none"))
    assert 0 <= plan.rho < 1
    assert math.isfinite(plan.consensus_error)
    assert plan.expected_comm_time <= budget * plan.num_colors * (1 + 1e-12)
    used = {worker for matching in plan.matchings for link in matching for worker in link}
    assert used == set(range(num_workers))
    assert cycles.connects(steps_of(plan), num_workers)
    assert all(is_matching(matching) and matching for matching in plan.matchings)


def test_effort_pays():
    topology = families.paper("geometric16-d5")
    errors = [
        matcha.plan(topology, 0.1, Greedy(effort=effort)).consensus_error
        for effort in ("none", "default")
    ]
    assert errors[1] < 0.8 * errors[0]


def test_the_same_plan_every_time():
    topology = families.paper("er8")
    first, second = (matcha.plan(topology, 0.3, "greedy") for _ in range(2))
    assert first.digest == second.digest
    assert all(isinstance(j, int) for active in first.schedule.cycle for j in active)


def test_the_best_attempt_is_kept():
    # Three attempts: 0.57007, then 0.5752 and 0.57383 with longer cycles.
    plan = matcha.plan(families.paper("er8"), 0.3, Greedy(effort="none"))
    assert plan.consensus_error < 0.5701


def test_the_seed_decides_the_exact_search():
    topology = families.paper("er16")
    plans = [matcha.plan(topology, 0.1, Greedy(effort="none"), seed=seed) for seed in range(3)]
    assert len({plan.matchings for plan in plans}) > 1
    again = matcha.plan(topology, 0.1, Greedy(effort="none"), seed=2)
    assert again.digest == plans[2].digest


@pytest.mark.parametrize("budget", [1e-3, 1e-4, 1e-5])
def test_every_budget_ends(budget):
    plan = matcha.plan(families.paper("er8"), budget, Greedy(effort="none"))
    # What happens in between is noise that piles up: the error grows as the budget shrinks.
    assert plan.consensus_error * budget == pytest.approx(0.29, rel=0.1)
    assert plan.expected_comm_time <= budget * plan.num_colors


def test_saved_and_loaded_unchanged(tmp_path):
    plan = matcha.plan(families.paper("er8"), 0.1, Greedy(effort="none"))
    plan.save(tmp_path / "plan.json")
    again = matcha.Plan.load(tmp_path / "plan.json")
    assert again.digest == plan.digest
    assert [r.matchings for r in again.rounds(0, 50)] == [r.matchings for r in plan.rounds(0, 50)]


def test_laplacian_mixing_is_refused():
    with pytest.raises(InputError, match="has pairwise or push mixing, not laplacian"):
        Greedy(mixing="laplacian")


def test_a_hypercube_inside_is_found():
    # On a complete graph of 16 all links tie; nothing can beat the doubling bound.
    plan = matcha.plan(families.complete(16), 0.2, Greedy(effort="none"))
    assert plan.expected_comm_time == 3.0
    hypercube = matcha.plan(families.hypercube(4), 0.25, "greedy")
    assert hypercube.consensus_error == pytest.approx(doubling_bound(16, 1.0))
    assert plan.consensus_error >= doubling_bound(16, 3.0) - 1e-12


# -- links that differ --------------------------------------------------------------------------


def slow_topology():
    topology = families.paper("geometric16-d10")
    slow = {0, 5, 11}
    return topology.with_link_times([1.0 if slow & {i, j} else 0.1 for i, j in topology.links])


def test_seconds_are_spent_where_they_gain_most():
    topology = slow_topology()
    plain = dataclasses.replace(topology, link_times=None)
    for budget in (0.1, 0.3):
        ours = matcha.plan(topology, budget, "greedy")
        paper = matcha.plan(topology, budget, Matcha(alpha="error"))
        assert ours.timing.unit == "seconds"
        limit = budget * sum(ours.timing.matching_time(m) for m in decompose(topology))
        assert ours.expected_comm_time <= limit * (1 + 1e-9)
        assert ours.consensus_error < paper.consensus_error
        # Knowing the times beats not knowing them, at the same seconds per iteration.
        blind = matcha.plan(plain, budget, "greedy")
        seconds = sum(ours.timing.round_time(round_.matchings) for round_ in cycle_of(blind)) / len(
            blind.schedule.cycle
        )
        assert ours.expected_comm_time < seconds
        assert ours.consensus_error < 1.3 * blind.consensus_error


def test_random_links_and_scaled_times_stay_in_budget():
    topology = families.paper("er8")
    rng = np.random.default_rng(0)
    samples = tuple(tuple(row) for row in rng.uniform(0.5, 1.5, (5, len(topology.links))).tolist())
    timing = RandomLinks(topology, samples)
    plan = matcha.plan(topology, 0.3, Greedy(effort="none"), timing=timing)
    limit = timing.allowance(decompose(topology), 0.3)
    assert plan.expected_comm_time <= limit * (1 + 1e-9)
    scaled = Scaled(lambda n: n**0.5, 5)
    plan = matcha.plan(topology, 0.6, Greedy(effort="none"), timing=scaled)
    assert plan.expected_comm_time <= 0.6 * scaled.round_time(decompose(topology)) * (1 + 1e-9)
    assert plan.expected_comm_time >= 0.5 * scaled.round_time(decompose(topology))


# -- many workers -------------------------------------------------------------------------------


@pytest.mark.slow
def test_large_graphs_are_sketched_and_say_so():
    topology = families.geometric(300, radius=0.1, seed=1)
    plan = matcha.plan(topology, 0.1, "greedy")
    assert "sketch" in plan.notes[0]
    assert plan.expected_comm_time <= 0.1 * plan.num_colors
    assert cycles.connects(steps_of(plan), 300)
    exact = theory.consensus_error(plan.process)
    assert plan.consensus_error == pytest.approx(exact, rel=0.05)
    assert plan.rho == pytest.approx(cycles.contraction(steps_of(plan), 300, plan.alpha), abs=1e-3)
