from __future__ import annotations

import numpy as np
import pytest

import matcha


@pytest.mark.parametrize("topology", [matcha.families.ring(6), matcha.families.star(70)])
def test_every_worker_has_a_point_of_its_own(topology):
    points = topology.layout
    assert points.shape == (topology.num_workers, 2)
    assert np.isfinite(points).all()
    assert len(np.unique(points.round(9), axis=0)) == topology.num_workers


def test_own_positions_are_kept():
    topology = matcha.families.geometric(8, radius=0.6, seed=1)
    np.testing.assert_array_equal(topology.layout, topology.positions)


def test_the_same_topology_is_drawn_the_same():
    one, other = (matcha.families.erdos_renyi(12, 0.4, seed=3) for _ in range(2))
    np.testing.assert_array_equal(one.layout, other.layout)
