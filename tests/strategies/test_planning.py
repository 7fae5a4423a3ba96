"""Plans from topologies: what each strategy promises, and what it keeps to."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.graphs import topologies

import matcha
from matcha import families
from matcha.errors import InputError, PlanError
from matcha.matchings import is_decomposition
from matcha.mixing import is_doubly_stochastic
from matcha.timing import LinkSeconds, Scaled

budgets = st.floats(0.01, 1.0)


@settings(max_examples=30)
@given(topologies(max_workers=10), budgets, st.sampled_from(["matcha", "single", "periodic"]))
def test_every_plan_contracts_within_its_budget(topology, budget, strategy):
    plan = matcha.plan(topology, budget, strategy, effort="none")
    assert is_decomposition(topology, plan.matchings)
    assert len(plan.matchings) == plan.num_colors <= topology.max_degree + 1
    assert sum(plan.probabilities) <= budget * plan.num_colors + 1e-9
    assert plan.expected_comm_time == pytest.approx(sum(plan.probabilities))
    assert plan.rho < 1.0
    for k in range(5):
        W = plan.mixing_matrix(k)
        np.testing.assert_allclose(W, W.T, atol=1e-15)
        assert is_doubly_stochastic(W)


@settings(max_examples=15)
@given(topologies(max_workers=8), budgets)
def test_empirical_contraction_matches_rho(topology, budget):
    plan = matcha.plan(topology, budget, effort="none")
    m = plan.num_workers
    number = 4000
    mean = np.zeros((m, m))
    for k in range(number):
        W = plan.mixing_matrix(k)
        mean += W.T @ W / number
    # Entries are bounded by (1 + 2α·degree)², so four standard errors of the norm stay below this.
    spread = (1 + 2 * plan.alpha * topology.max_degree) ** 2
    found = np.linalg.norm(mean - 1.0 / m, 2)
    assert found == pytest.approx(plan.rho, abs=4 * spread * np.sqrt(m / number))


@pytest.mark.parametrize("name", ["er8", "geometric16-d5", "er16"])
def test_matcha_with_the_whole_budget_is_vanilla(name):
    topology = families.paper(name)
    full, vanilla = matcha.plan(topology, 1.0), matcha.plan(topology, 1.0, "vanilla")
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


def test_single_draws_one_matching_and_both_mixings_agree():
    topology = families.paper("er16")
    plan = matcha.plan(topology, 0.5, "single")
    pairwise = matcha.plan(topology, 0.5, "single", mixing="pairwise")
    assert sum(plan.probabilities) == pytest.approx(1.0, abs=1e-9)
    assert plan.rho == pairwise.rho
    for k in range(50):
        assert len(plan.round(k).matchings) <= 1
        np.testing.assert_allclose(plan.mixing_matrix(k), pairwise.mixing_matrix(k))
    thin = matcha.plan(topology, 0.05, "single")
    assert sum(thin.probabilities) == pytest.approx(0.05 * 8, abs=1e-9)


@pytest.mark.parametrize("strategy", ["vanilla", "periodic"])
def test_pairwise_mixing_is_refused_where_all_links_talk_at_once(strategy):
    with pytest.raises(InputError, match="has laplacian mixing"):
        matcha.plan(families.ring(6), 0.5, strategy, mixing="pairwise")


@pytest.mark.parametrize("decomposition", ["links", "cliques"])
def test_other_subgraphs_keep_to_the_same_time(decomposition):
    topology = families.paper("geometric16-d10")
    plan = matcha.plan(topology, 0.5, decomposition=decomposition)
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
    plan = matcha.plan(topology, 0.5, timing=Scaled(lambda n: float(n) ** 0.5, 8), effort="none")
    # t(Σp) <= C_b t(M): √Σp = √8 / 2.
    assert sum(plan.probabilities) == pytest.approx(2.0, abs=1e-6)
    cliques = matcha.plan(
        topology, 0.5, timing=Scaled(lambda n: float(n) ** 0.5, 20), decomposition="cliques"
    )
    times = [cliques.round_time(cliques.round(k)) for k in range(4000)]
    error = 4 * np.std(times) / np.sqrt(len(times))
    assert cliques.expected_comm_time == pytest.approx(np.mean(times), abs=error)


@pytest.mark.parametrize("strategy", ["matcha", "single", "periodic", "vanilla"])
def test_link_seconds_are_what_is_spent(strategy):
    topology = families.paper("er16")
    times = [10.0 if 12 in link else 1.0 for link in topology.links]
    timed = topology.with_link_times(times)
    plan = matcha.plan(timed, 0.4, strategy)
    full = LinkSeconds(timed).round_time(plan.matchings)
    costs = LinkSeconds(timed).costs(plan.matchings)
    assert plan.expected_comm_time == pytest.approx(np.dot(costs, plan.probabilities))
    assert plan.expected_comm_time <= (1.0 if strategy == "vanilla" else 0.4) * full + 1e-9
    assert plan.timing.unit == "seconds"


def test_the_smallest_self_weight_is_that_of_the_busiest_worker():
    plan = matcha.plan(families.paper("er8"), strategy="vanilla")
    lowest = min(plan.mixing_matrix(k).diagonal().min() for k in range(3))
    assert plan.smallest_self_weight == pytest.approx(lowest)


def test_notes_warn_of_negative_weights_and_of_better_alternatives():
    ring = matcha.plan(families.ring(8), 0.5)
    assert any("below zero" in note for note in ring.notes)
    assert any("periodic" in note for note in ring.notes)
    assert ring.smallest_self_weight < 0
    assert "below zero" in ring.summary()
    assert matcha.plan(families.path(2), 0.5).notes == ()


def test_the_seed_decides_everything():
    topology = families.paper("er16")
    one, same = (matcha.plan(topology, 0.3, seed=4) for _ in range(2))
    assert one == same
    assert one.digest == same.digest
