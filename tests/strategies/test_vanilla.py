from __future__ import annotations

import numpy as np
import pytest

import matcha


@pytest.mark.parametrize("name", ["er8", "geometric16-d10"])
def test_all_links_talk_at_every_iteration_whatever_the_budget(name):
    topology = matcha.families.paper(name)
    plan = matcha.plan(topology, 0.3, "vanilla")
    assert plan.budget == 1.0
    for k in (0, 1, 12_345):
        links = [link for matching in plan.round(k).matchings for link in matching]
        assert sorted(links) == sorted(topology.links)


def test_the_weight_is_the_best_constant_one():
    topology = matcha.families.paper("er8")
    plan = matcha.plan(topology, 1.0, "vanilla")
    spectrum = np.linalg.eigvalsh(topology.laplacian().toarray())
    assert plan.alpha == pytest.approx(2 / (spectrum[1] + spectrum[-1]))
    assert plan.rho == pytest.approx((1 - plan.alpha * spectrum[1]) ** 2)
    assert plan.rho == pytest.approx(0.6538, abs=5e-5)
