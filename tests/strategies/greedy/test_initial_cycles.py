"""Cycles known beforehand: only where their links are, and as good as is known of them."""

from __future__ import annotations

from fractions import Fraction

import pytest
from benchmarks.parts.supports import doubling_bound
from tests.strategies.greedy.networks import network

from matcha import families
from matcha.strategies.greedy.initial_cycles import as_circles, both_ways, initial_cycles


def test_a_hypercubes_cycle_is_known_where_its_links_are():
    cube = families.hypercube(3)
    (known,) = initial_cycles(cube, network(cube, Fraction(1)))
    assert known.with_error().error == pytest.approx(doubling_bound(8, 1.0))
    for other in (families.ring(8), families.complete(6)):
        assert initial_cycles(other, network(other, Fraction(1))) == []


def test_a_cycle_is_repeated_until_its_time_is_whole_iterations():
    cube = families.hypercube(3)
    (known,) = initial_cycles(cube, network(cube, Fraction(2)))
    assert len(known.matchings) == 6
    assert sum(iterations for iterations, _ in known.numbers()) == 3


def test_one_way_messages_know_hops_as_well():
    topology = families.complete(8)
    net = network(topology, Fraction(1), directed=True)
    found = [candidate.with_error().error for candidate in initial_cycles(topology, net)]
    # The hypercube's exchanges, the one-peer exponential graph, and the best hops found.
    assert len(found) == 3
    assert found == pytest.approx([doubling_bound(8, 1.0)] * 3)


def test_exchanges_are_circles_of_two():
    assert both_ways(((0, 1), (2, 3))) == ((0, 1), (1, 0), (2, 3), (3, 2))
    cube = families.hypercube(3)
    (known,) = initial_cycles(cube, network(cube, Fraction(3, 4)))
    circles = as_circles(known, network(cube, Fraction(3, 4), directed=True))
    assert [len(chosen) for chosen in circles.matchings] == [8] * len(known.matchings)
    assert circles.error == pytest.approx(known.with_error().error)
