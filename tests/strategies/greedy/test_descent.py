"""Descent: every step lowers the exact error, and what it ends with are matchings."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from tests.strategies.greedy.networks import network

from matcha import families
from matcha.matchings import is_matching
from matcha.strategies.greedy.candidates import Candidate
from matcha.strategies.greedy.descent import descend, kick, with_best_weight
from matcha.strategies.greedy.max_weight import max_weight_matching


@pytest.mark.parametrize("weight", [0.5, 0.62])
def test_refinement_descends_and_keeps_matchings(weight):
    topology = families.paper("er16")
    net = network(topology, Fraction(8, 10))
    rng = np.random.default_rng(3)
    chosen = [max_weight_matching(net.links, rng.random(len(net.links)), 16) for _ in range(12)]
    start = Candidate(
        network=net, matchings=tuple(chosen), costs=(Fraction(1),) * 12, weight=weight
    ).with_error()
    better = descend(start)
    assert better.error < 0.9 * start.error
    assert better.error == pytest.approx(better.with_error().error)
    for matching in better.matchings:
        assert is_matching([topology.links[e] for e in matching])


def path_cycle(weight):
    net = network(families.path(4), Fraction(1))
    chosen = (np.array([0, 2]), np.array([1]))
    return Candidate(
        network=net, matchings=chosen, costs=(Fraction(1),) * 2, weight=weight
    ).with_error()


def test_the_best_weight_is_better_than_those_beside_it():
    best = with_best_weight(path_cycle(0.5))
    assert best.error < path_cycle(0.5).error
    for step in (-0.02, 0.02):
        assert path_cycle(best.weight + step).error > best.error


def test_kicks_leave_a_local_minimum_and_never_make_it_worse():
    net = network(families.paper("er8"), Fraction(1))
    rng = np.random.default_rng(0)
    chosen = tuple(net.max_weight(rng.random(len(net.links))) for _ in range(6))
    start = Candidate(network=net, matchings=chosen, costs=(Fraction(1),) * 6, weight=0.5)
    local = descend(start, 2)
    better = kick(local, 2, 1)
    assert better.error < local.error
    assert better.error == pytest.approx(better.with_error().error)
