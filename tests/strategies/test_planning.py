"""Plans from topologies: what each strategy promises, and what it keeps to."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.graphs import topologies

import matcha
from matcha import families
from matcha.errors import InputError
from matcha.matchings import is_decomposition
from matcha.mixing import is_doubly_stochastic
from matcha.strategies import Matcha, Single, make_strategy, strategy_with
from matcha.timing import LinkSeconds

budgets = st.floats(0.01, 1.0)


@settings(max_examples=30)
@given(topologies(max_workers=10), budgets, st.sampled_from(["matcha", "single", "periodic"]))
def test_every_plan_contracts_within_its_budget(topology, budget, strategy):
    plan = matcha.plan(topology, budget, strategy_with(strategy, effort="none"))
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
    plan = matcha.plan(topology, budget, Matcha(effort="none"))
    m = plan.num_workers
    number = 4000
    mean = np.zeros((m, m))
    for round_, count in Counter(plan.rounds(0, number)).items():
        W = round_.matrix(m)
        mean += count * (W.T @ W) / number
    # Entries are bounded by (1 + 2α·degree)², so four standard errors of the norm stay below this.
    spread = (1 + 2 * plan.alpha * topology.max_degree) ** 2
    found = np.linalg.norm(mean - 1.0 / m, 2)
    assert found == pytest.approx(plan.rho, abs=4 * spread * np.sqrt(m / number))


def test_single_draws_one_matching_and_both_mixings_agree():
    topology = families.paper("er16")
    plan = matcha.plan(topology, 0.5, "single")
    pairwise = matcha.plan(topology, 0.5, Single(mixing="pairwise"))
    assert sum(plan.probabilities) == pytest.approx(1.0, abs=1e-9)
    assert plan.rho == pairwise.rho
    for k in range(50):
        assert len(plan.round(k).matchings) <= 1
        np.testing.assert_allclose(plan.mixing_matrix(k), pairwise.mixing_matrix(k))
    thin = matcha.plan(topology, 0.05, "single")
    assert sum(thin.probabilities) == pytest.approx(0.05 * 8, abs=1e-9)


@pytest.mark.parametrize("strategy", ["vanilla", "periodic"])
def test_pairwise_mixing_is_refused_where_all_links_talk_at_once(strategy):
    with pytest.raises(InputError, match="takes no mixing: leave it out, or use matcha, greedy"):
        make_strategy(strategy, mixing="pairwise")


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


def test_the_seed_decides_everything():
    topology = families.paper("er16")
    one, same = (matcha.plan(topology, 0.3, "matcha", seed=4) for _ in range(2))
    assert one == same
    assert one.digest == same.digest


@pytest.mark.parametrize(
    ("topology", "strategy", "effort", "kinds"),
    [
        ("geometric:30:0.35:1", "matcha", "default", ["among decompositions", "of eq. 5"]),
        ("paper:er8", "single", "default", ["of eq. 5"]),
        ("ring:4", "greedy", "default", ["cycles of about"]),
        ("ring:258", "greedy", "default", ["of three runs"]),
    ],
)
def test_searches_say_how_far_they_are_and_never_go_beyond(topology, strategy, effort, kinds):
    said = []
    graph = families.parse(topology)
    matcha.plan(
        graph, 0.3, strategy_with(strategy, effort=effort), progress=lambda *news: said.append(news)
    )
    assert all(any(kind in steps for _, _, steps in said) for kind in kinds), said
    for steps in {steps for _, _, steps in said}:
        done = [n for n, _, other in said if other == steps]
        most = {n for _, n, other in said if other == steps}
        assert done == list(range(1, len(done) + 1))
        assert len(most) == 1
        assert done[-1] <= most.pop()
