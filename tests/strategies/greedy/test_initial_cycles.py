"""Cycles known beforehand: only where their links are, and as good as is known of them."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from benchmarks.parts.supports import doubling_bound
from tests.strategies.greedy.networks import network

from matcha import families
from matcha.strategies.finite_time import messages
from matcha.strategies.greedy.candidates import Candidate
from matcha.strategies.greedy.initial_cycles import (
    as_circles,
    best_hops,
    both_ways,
    hops_error,
    initial_cycles,
    possible_hops,
)


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
    assert circles.with_error().error == pytest.approx(known.with_error().error)


# -- hops ------------------------------------------------------------------------------------------


def test_only_hops_with_all_their_links_are_possible():
    assert possible_hops(families.ring(6)) == (1, 5)
    assert possible_hops(families.complete(5)) == (1, 2, 3, 4)
    assert possible_hops(families.path(4)) == ()


@pytest.mark.parametrize("hops", [(1, 2, 4), (1, 3), (2, 5, 1)])
@pytest.mark.parametrize("rate", [Fraction(1), Fraction(1, 2), Fraction(3, 2)])
def test_the_error_is_that_of_the_cycle_of_messages(hops, rate):
    net = network(families.complete(6), rate, directed=True)
    place = {(sender, receiver): e for e, (receiver, sender) in enumerate(net.links.tolist())}
    # Three times: at three rounds in two iterations all cycles then end with an iteration.
    matchings = tuple(np.array([place[a] for a in messages(6, hop)]) for hop in hops * 3)
    cycle = Candidate(
        network=net, matchings=matchings, costs=(Fraction(1),) * len(matchings), weight=0.5
    )
    found = float(hops_error(np.array([hops]), 6, rate)[0])
    assert found == pytest.approx(cycle.with_error().error)


def test_hops_that_leave_somebody_out_never_settle():
    assert np.isinf(hops_error(np.array([[2, 4]]), 6, Fraction(1)))[0]


def test_hops_that_are_no_powers_of_two_can_be_better():
    hops = best_hops(12, range(1, 12), Fraction(1))
    ours, exponential = (
        hops_error(np.array([some]), 12, Fraction(1))[0] for some in (hops, (1, 2, 4, 8))
    )
    assert ours < 0.93 * exponential
