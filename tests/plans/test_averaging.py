from __future__ import annotations

import pytest

import matcha
from matcha.plans import all_reduce_time
from matcha.timing import default_timing


def test_behind_a_switch_any_two_workers_are_one_exchange_apart():
    for topology in (matcha.families.ring(8), matcha.families.star(8)):
        assert all_reduce_time(default_timing(topology), topology) == pytest.approx(1.75)


def test_with_link_times_hops_follow_links():
    path = matcha.Topology.from_links([(0, 1), (1, 2), (2, 3)], link_times=[0.1, 0.2, 0.3])
    # The ring 0, 1, 2, 3 closes along the whole path.
    assert all_reduce_time(default_timing(path), path) == pytest.approx(1.5 * 0.6)
