from __future__ import annotations

import pytest

import matcha


@pytest.mark.parametrize("budget", [0.1, 0.25, 0.4, 1.0])
def test_all_links_or_none_in_a_share_of_the_iterations(budget):
    topology = matcha.families.ring(5)
    plan = matcha.plan(topology, budget, "periodic")
    sizes = [sum(map(len, plan.round(k).matchings)) for k in range(1000)]
    assert set(sizes) <= {0, len(topology.links)}
    assert sum(map(bool, sizes)) == pytest.approx(1000 * budget, abs=1)


def test_the_papers_figure():
    plan = matcha.plan(matcha.families.paper("er8"), 0.5, "periodic")
    assert plan.rho == pytest.approx(0.8269, abs=5e-5)
