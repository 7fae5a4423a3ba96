"""Hops: which there are, and their error, against the exact one of the same cycle."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from tests.strategies.greedy.networks import network

from matcha import families
from matcha.strategies.finite_time import messages
from matcha.strategies.greedy.candidates import Candidate
from matcha.strategies.greedy.circulant import best_hops, hops_error, possible_hops


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
