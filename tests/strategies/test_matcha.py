"""MATCHA's plans: vanilla where the budget allows it, and subgraphs within the same time."""

from __future__ import annotations

import numpy as np
import pytest

import matcha
from matcha import families
from matcha.errors import InputError, PlanError
from matcha.matchings import is_decomposition
from matcha.strategies import Matcha, Single
from matcha.timing import Scaled


@pytest.mark.parametrize("name", ["er8", "geometric16-d5", "er16"])
def test_matcha_with_the_whole_budget_is_vanilla(name):
    topology = families.paper(name)
    full, vanilla = matcha.plan(topology, 1.0, "matcha"), matcha.plan(topology, 1.0, "vanilla")
    assert (full.alpha, full.rho) == (vanilla.alpha, vanilla.rho)
    assert full.probabilities == vanilla.probabilities == (1.0,) * topology.max_degree
    assert [full.round(k) for k in range(50)] == [vanilla.round(k) for k in range(50)]


def test_a_decomposition_of_the_users_own_is_taken_as_it_is():
    topology, own = families.paper("er8"), families.paper_matchings("er8")
    plan = matcha.plan(topology, 0.5, matchings=own)
    assert plan.matchings == own
    assert plan.rho == pytest.approx(0.6440, abs=5e-4)
    with pytest.raises(PlanError, match="in no matching"):
        matcha.plan(topology, 0.5, matchings=own[:-1])


@pytest.mark.parametrize("decomposition", ["links", "cliques"])
def test_other_subgraphs_keep_to_the_same_time(decomposition):
    topology = families.paper("geometric16-d10")
    plan = matcha.plan(topology, 0.5, Matcha(decomposition=decomposition))
    assert plan.num_colors == 10
    assert plan.expected_comm_time <= 0.5 * 10 + 1e-9
    assert is_decomposition(topology, plan.matchings)
    assert plan.rho < 1.0
    for group in getattr(plan.schedule, "groups", ()):
        assert len({plan.probabilities[j] for j in group}) == 1
    for k in range(20):
        active = set(plan.round(k).indices)
        for group in getattr(plan.schedule, "groups", ()):
            assert active.issuperset(group) or active.isdisjoint(group)


def test_an_increasing_delay_bounds_the_number_of_matchings():
    topology = families.paper("er16")
    plan = matcha.plan(
        topology, 0.5, Matcha(effort="none"), timing=Scaled(lambda n: float(n) ** 0.5, 8)
    )
    # t(Σp) <= C_b t(M): √Σp = √8 / 2.
    assert sum(plan.probabilities) == pytest.approx(2.0, abs=1e-6)
    cliques = matcha.plan(
        topology, 0.5, Matcha(decomposition="cliques"), timing=Scaled(lambda n: float(n) ** 0.5, 20)
    )
    times = [cliques.round_time(cliques.round(k)) for k in range(4000)]
    error = 4 * np.std(times) / np.sqrt(len(times))
    assert cliques.expected_comm_time == pytest.approx(np.mean(times), abs=error)


def test_cliques_share_coins_which_pairwise_mixing_cannot():
    with pytest.raises(InputError, match="cliques share coins"):
        matcha.plan(
            families.complete(4),
            0.5,
            Matcha(decomposition="cliques", mixing="pairwise", effort="none"),
        )


# -- one matching at a time -----------------------------------------------------------------------


def test_single_draws_at_most_one_matching_an_iteration():
    plan = matcha.plan(matcha.families.paper("er8"), 0.2, "single")
    assert {len(plan.round(k).matchings) for k in range(500)} <= {0, 1}
    assert sum(plan.probabilities) <= 0.2 * len(plan.matchings) + 1e-9


def test_both_ends_take_their_mean_so_the_two_mixings_are_one():
    topology = matcha.families.ring(4)
    laplacian = matcha.plan(topology, 0.5, Single(mixing="laplacian"))
    pairwise = matcha.plan(topology, 0.5, Single(mixing="pairwise"))
    assert laplacian.alpha == pairwise.alpha == 0.5
    assert laplacian.rho == pytest.approx(pairwise.rho)


def test_singles_own_probabilities_beyond_the_budget_are_refused():
    with pytest.raises(InputError):
        matcha.plan(matcha.families.ring(4), 0.1, Single(probabilities=[0.5, 0.5]))
