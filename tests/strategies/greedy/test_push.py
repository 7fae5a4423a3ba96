"""Greedy over one-way rounds: never worse than over matchings, nor than one-peer exponential."""

import numpy as np
import pytest
from benchmarks.parts.supports import doubling_bound
from hypothesis import given, settings
from hypothesis import strategies as st

import matcha
from matcha import Topology, families, theory
from matcha.errors import InputError, PlanError
from matcha.matchings import decompose
from matcha.rounds import PushSum
from matcha.strategies import Greedy, Rounds


def digraph(seed, num_workers=8):
    """A random strongly connected digraph: a circle, and arrows beside it."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(num_workers).tolist()
    arrows = {(a, b) for a, b in zip(order, [*order[1:], order[0]], strict=True)}
    extra = rng.integers(0, num_workers, size=(2 * num_workers, 2)).tolist()
    arrows |= {(a, b) for a, b in extra if a != b}
    return Topology.from_links(sorted(arrows), num_workers, directed=True)


@pytest.mark.parametrize("workers", [12, 20])
def test_at_most_the_error_of_one_peer_exponential_on_complete_graphs(workers):
    topology = families.complete(workers)
    budget = 1 / (workers - 1)
    ours = matcha.plan(topology, budget, Greedy(mixing="push", effort="none"))
    other = matcha.plan(topology, budget, "one-peer")
    assert ours.expected_comm_time <= 1
    assert ours.consensus_error <= other.consensus_error
    assert not ours.needs_push_sum
    assert doubling_bound(workers, 1.0) <= ours.consensus_error


@pytest.mark.parametrize("name", ["paper:er8", "ring:6", "torus:3x3"])
def test_never_worse_than_matchings_where_links_go_both_ways(name):
    topology = families.parse(name)
    pairs = matcha.plan(topology, 0.3, "greedy")
    push = matcha.plan(topology, 0.3, Greedy(mixing="push"))
    assert push.consensus_error <= pairs.consensus_error * (1 + 1e-9)
    assert push.consensus_error == pytest.approx(theory.consensus_error(push.process), rel=1e-9)


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6), budget=st.sampled_from([0.1, 0.5, 1.0]))
def test_every_strongly_connected_digraph_reaches_consensus(seed, budget):
    topology = digraph(seed)
    plan = matcha.plan(topology, budget, Greedy(effort="none"))
    assert plan.mixing == "push"
    assert 0 <= plan.rho < 1
    assert not plan.needs_push_sum
    assert plan.expected_comm_time <= budget * plan.num_colors * (1 + 1e-12)
    x = np.random.default_rng(0).normal(size=(8, 2))
    mixed, period = x, len(plan.schedule.cycle)
    for round_ in plan.rounds(0, min(60 * period, 20_000)):
        mixed = round_.mix(mixed)
    np.testing.assert_allclose(mixed.sum(0), x.sum(0), atol=1e-12)
    assert np.ptp(mixed, axis=0).max() < np.ptp(x, axis=0).max()


def test_own_rounds_that_do_not_come_round_need_push_sum(tmp_path):
    topology = digraph(3)
    rounds = [[[link]] for link in topology.links]
    plan = matcha.plan(topology, 1.0, Rounds(rounds=rounds))
    assert plan.needs_push_sum
    assert plan.consensus_error == pytest.approx(simulated(plan), rel=0.1)
    plan.save(tmp_path / "plan.json")
    again = matcha.Plan.load(tmp_path / "plan.json")
    assert again.digest == plan.digest
    assert again.topology.directed


def simulated(plan, columns=400):
    """Noisy push-sum, run: the mean of (1/m) Σ (z_i − average)² after the beginning."""
    m, rng = plan.num_workers, np.random.default_rng(0)
    state = PushSum(np.zeros((m, columns)))
    z, total, counted = np.zeros((m, columns)), 0.0, 0
    for k, round_ in enumerate(plan.rounds(0, 1500)):
        z = state.mix(round_, z + rng.standard_normal(z.shape))
        if k >= 500:
            total += float(np.square(z - state.x.mean(0)).sum()) / (m * columns)
            counted += 1
    return total / counted


def test_other_strategies_need_links_that_go_both_ways():
    for strategy in ("matcha", "vanilla", "hypercube"):
        with pytest.raises(InputError, match="carry one way"):
            matcha.plan(digraph(1), 0.5, strategy)
    with pytest.raises(PlanError, match="twice as receiver"):
        matcha.plan(families.complete(3), 1.0, Rounds(rounds=[[[(0, 1), (2, 1)]]], mixing="push"))


def test_upload_and_download_times_may_differ():
    topology = digraph(5)
    times = [1.0 if i < j else 0.1 for i, j in topology.links]
    plan = matcha.plan(topology.with_link_times(times), 0.3, Greedy(effort="none"))
    assert plan.timing.unit == "seconds"
    assert plan.expected_comm_time <= plan.timing.round_time(decompose(topology)) * 0.3 + 1e-9
