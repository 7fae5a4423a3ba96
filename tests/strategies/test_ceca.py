"""CECA: the exact mean of any number of workers by ⌈log2 m⌉ hops of sums."""

from __future__ import annotations

import math

import numpy as np
import pytest

import matcha
from matcha import Topology, families
from matcha.errors import InputError
from matcha.strategies.finite_time import ceca_hops


@pytest.mark.parametrize("workers", [2, 3, 5, 6, 7, 8, 12, 27, 33])
def test_any_number_of_workers_has_the_mean_after_the_fewest_hops(workers):
    topology = families.complete(workers) if workers > 2 else families.path(2)
    plan = matcha.plan(topology, 1 / len(matcha.plan(topology, 1.0, "matcha").matchings), "ceca")
    hops = math.ceil(math.log2(workers))
    assert len(plan.matchings) == len(ceca_hops(workers)) == hops
    assert plan.expected_comm_time == pytest.approx(1.0)
    rounds = list(plan.rounds(0, hops))
    assert [bool(round_) for round_ in rounds] == [False] * (hops - 1) + [True]
    np.testing.assert_allclose(rounds[-1].matrix(workers), 1 / workers, atol=1e-15)
    # Disagreement grows by (m − 1)/m an iteration and is gone when the sums have gone round.
    assert plan.consensus_error == pytest.approx((hops - 1) / 2 * (workers - 1) / workers)
    assert plan.rho == pytest.approx(1 - 1 / hops)
    assert plan.smallest_self_weight == pytest.approx(1 / workers)


def test_one_way_links_are_enough(tmp_path):
    arrows = [(i, (i + hop) % 6) for hop in ceca_hops(6) for i in range(6)]
    topology = Topology.from_links(sorted(set(arrows)), directed=True)
    plan = matcha.plan(topology, 1.0, "ceca")
    x = np.random.default_rng(0).standard_normal((6, 4))
    last = next(round_ for round_ in plan.rounds() if round_)
    np.testing.assert_allclose(last.mix(x), np.broadcast_to(x.mean(axis=0), x.shape), atol=1e-14)
    plan.save(tmp_path / "plan.json")
    assert matcha.Plan.load(tmp_path / "plan.json") == plan


def test_a_missing_link_is_named_and_nobody_can_be_left_out():
    with pytest.raises(InputError, match="ceca needs the link from worker 0 to 2"):
        matcha.plan(families.ring(8), 0.5, "ceca")
    plan = matcha.plan(families.complete(6), 0.5, "ceca")
    with pytest.raises(InputError, match="pass through every worker"):
        plan.without([3])
    busy = next(round_ for round_ in plan.rounds() if round_)
    with pytest.raises(InputError, match="pass through every worker"):
        busy.without([3])
