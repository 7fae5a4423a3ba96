"""The sketch: nearly as good as the exact search, and connected whatever it chose."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from tests.strategies.greedy.networks import network

import matcha
from matcha import families
from matcha.matchings import decompose, is_matching
from matcha.strategies import Greedy
from matcha.strategies.greedy import sketch
from matcha.strategies.greedy.candidates import Candidate
from matcha.theory import cycles


@pytest.mark.parametrize("directed", [False, True])
def test_a_cycle_that_leaves_workers_out_is_covered(directed):
    topology = families.ring(6)
    net = network(topology, Fraction(1, 2), directed=directed)
    pair = np.flatnonzero(np.isin(net.links, (0, 1)).all(axis=1))
    start = Candidate(network=net, matchings=(pair,), costs=(Fraction(1),), weight=0.5)
    assert not cycles.connects(start.turns(), 6)
    covered = sketch.covering(start)
    assert cycles.connects(covered.turns(), 6)
    assert covered.matchings[0] is pair
    assert len(covered.costs) == len(covered.matchings)
    if not directed:
        assert all(is_matching([topology.links[e] for e in n]) for n in covered.matchings)
    # What connects all already is left as it is.
    assert sketch.covering(covered).matchings == covered.matchings


def test_the_estimated_error_is_the_exact_one():
    # In half of the iterations nobody talks, and noise piles up.
    net = network(families.torus(4, 4), Fraction(1, 2))
    rng = np.random.default_rng(0)
    matchings = tuple(net.max_weight(rng.random(len(net.links))) for _ in range(12))
    cycle = Candidate(network=net, matchings=matchings, costs=(Fraction(1),) * 12, weight=0.5)
    found = sketch.measure_error(sketch._Graph(net), cycle, 2000, seed=1)
    assert found.error == pytest.approx(cycle.with_error().error, rel=0.05)


def test_one_way_links_are_sketched_as_well():
    topology = families.one_way(families.parse("geometric:48:0.28:1"), 0.3)
    exact = matcha.plan(topology, 0.2, Greedy(effort="none"))
    net = network(topology, Fraction(repr(0.2)) * exact.num_colors, directed=True)
    found, note = sketch.sketched_cycle(net, probes=400)
    assert "permutations" in note
    for chosen in found.matchings:  # everyone who sends also hears: nobody's share grows
        assert sorted(net.links[chosen, 0]) == sorted(net.links[chosen, 1])
    true = found.with_error().error
    assert found.error == pytest.approx(true, rel=0.1)
    assert true <= 1.2 * exact.consensus_error


def test_the_contraction_of_many_workers_is_the_exact_one_for_messages_too(monkeypatch):
    topology = families.one_way(families.paper("er16"), 0.3)
    net = network(topology, Fraction(1), directed=True)
    rng = np.random.default_rng(0)
    cycle = [(1, [net.ends(net.max_weight(rng.random(len(net.links))))]) for _ in range(6)]
    exact = cycles.contraction(cycle, 16, 0.45)
    monkeypatch.setattr(cycles, "EXACT_UP_TO", 1)
    assert cycles.contraction(cycle, 16, 0.45) == pytest.approx(exact, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["geometric:96:0.17:1", "torus:10x10"])
def test_the_sketch_costs_at_most_a_tenth(name):
    topology = families.parse(name)
    rate = Fraction(repr(0.2)) * len(decompose(topology))
    sketched = sketch.sketched_cycle(network(topology, rate))[0]
    exact = matcha.plan(topology, 0.2, "greedy")
    true = sketched.with_error().error
    assert sketched.error == pytest.approx(true, rel=0.05)
    # The exact search gives each link a weight of its own, which the sketch does not.
    assert true <= 1.1 * exact.with_process(weights=None).consensus_error
