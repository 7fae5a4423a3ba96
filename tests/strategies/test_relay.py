"""RelaySum: sums relayed along a spanning tree (Vogels et al., 2021)."""

import networkx as nx
import numpy as np
import pytest
import torch

import matcha
from matcha import families
from matcha.errors import InputError, PlanError
from matcha.rounds import Relay
from matcha.simulation.execution import Graphs
from matcha.simulation.mixing import RelayMixing
from matcha.strategies.fixed import spanning_tree
from matcha.theory import consensus_error, contraction

TOPOLOGIES = [
    families.path(2),
    families.ring(7),
    families.star(6),
    families.complete(16),
    families.paper("geometric16-d10"),
]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_the_tree_spans_and_is_low_with_few_links_per_worker(topology):
    tree = nx.Graph(spanning_tree(topology))
    assert nx.is_tree(tree)
    assert set(tree) == set(range(topology.num_workers))
    assert set(spanning_tree(topology)) <= set(topology.links)
    assert max(dict(tree.degree).values()) <= (5 if topology.name == "star:6" else 3)
    assert nx.diameter(tree) <= 7


@pytest.mark.parametrize("budget", [1.0, 0.3])
@pytest.mark.parametrize("topology", TOPOLOGIES[1:4], ids=str)
def test_every_model_comes_once_and_a_round_late_per_worker_between(topology, budget):
    """x_i ← (1/n) Σ_j x_j of τ_ij rounds before, as in the paper; what has not come is its own."""
    plan = matcha.plan(topology, budget, "relaysum")
    n, random = plan.num_workers, np.random.default_rng(0)
    away = dict(nx.all_pairs_shortest_path_length(nx.Graph(spanning_tree(topology))))
    relay, x, stepped = Relay(), random.normal(size=(n, 3)), []
    for k in range(40):
        x = x - random.normal(size=(n, 3))
        if plan.round(k):
            stepped.append(x)
            t = len(stepped) - 1
            late = [[t - max(0, away[i][j] - 1) for j in range(n)] for i in range(n)]
            right = [[stepped[s][j] if s >= 0 else x[i] for j, s in enumerate(row)]
                     for i, row in enumerate(late)]  # fmt: skip
            x = relay.mix(plan.round(k), x)
            np.testing.assert_allclose(x, np.mean(right, axis=1), rtol=0, atol=1e-10)
    assert len(stepped) > 8


@pytest.mark.parametrize("budget", [1.0, 0.3])
def test_figures_are_those_of_the_rounds_themselves(budget):
    plan = matcha.plan(families.ring(7), budget, "relaysum")
    m, period = plan.num_workers, len(plan.schedule.period)
    round_, centre = plan.round(period - 1), np.eye(m) - 1 / m

    def sizes(noise):
        """Disagreement after each of many rounds after a noise, once all sums have come."""
        relay = Relay()
        for _ in range(10):
            relay.mix(round_, np.zeros((m, m)))
        x = noise
        for _ in range(200):
            x = relay.mix(round_, x)
            yield ((centre @ x) ** 2).sum()

    found = np.array(list(sizes(np.eye(m))))
    error = (period * found.sum() + (m - 1) * (period - 1) / 2) / m
    assert consensus_error(plan.process) == pytest.approx(error, rel=1e-6)
    decay = (found[80] / found[20]) ** (1 / 60 / period)
    assert contraction(plan.process) == pytest.approx(decay, rel=0.02)
    assert matcha.theory.drift_error(plan.process) == pytest.approx(
        0.0 if period == 1 else (m - 1) * np.mean(np.arange(period) ** 2) / m, abs=1e-9
    )


def test_the_simulator_relays_the_same_sums():
    plan = matcha.plan(families.paper("er8"), 0.3, "relaysum")
    rows = torch.randn(8, 5, dtype=torch.float64)
    tree = sorted(link for matching in plan.matchings for link in matching)
    mixing = RelayMixing([rows], tree, Graphs(torch.device("cpu"), capture=False))
    relay, x = Relay(), rows.numpy().copy()
    for k in range(30):
        rows += k
        x = relay.mix(plan.round(k), x + k)
        if plan.round(k):
            mixing.mix(k)
        np.testing.assert_allclose(rows.numpy(), x, rtol=0, atol=1e-10)


def test_it_says_what_it_cannot_do():
    with pytest.raises(InputError, match="needs both"):
        matcha.plan(families.one_way(families.ring(5), 0.0, seed=0), 1.0, "relaysum")
    with pytest.raises(InputError, match="adds up whole values"):
        matcha.plan("ring:5", 1.0, "relaysum", wire="modulo:3")
    with pytest.raises(InputError, match="whole tree"):
        matcha.plan("ring:5", 1.0, "relaysum").without([3])
    with pytest.raises(PlanError, match="go on from round to round"):
        matcha.staged_plan("ring:5", {0: 1.0, 9: 0.5}, "relaysum")
