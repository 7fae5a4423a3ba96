"""Eq. 5: optimal against a general solver, certified, and sound at the edges."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.graphs import topologies

from matcha import Topology, families
from matcha._numerics.spectra import laplacian
from matcha.activation import default_tolerance, knapsack_bound, optimal_probabilities
from matcha.errors import InputError
from matcha.matchings import decompose

PAPER = ["er8", "geometric16-d5", "geometric16-d10", "geometric16-d13", "er16"]


def one_per_link(topology):
    return [(link,) for link in topology.links]


def connectivity(matchings, p, num_workers):
    L = sum(
        q * laplacian(matching, num_workers).toarray()
        for matching, q in zip(matchings, p, strict=True)
    )
    return np.linalg.eigvalsh(L)[1]


def cvxpy_optimum(matchings, num_workers, limit, costs=None):
    cp = pytest.importorskip("cvxpy")
    m = num_workers
    Ls = [laplacian(matching, m).toarray() for matching in matchings]
    p, t = cp.Variable(len(Ls)), cp.Variable()
    L = sum(p[j] * L for j, L in enumerate(Ls))
    c = np.ones(len(Ls)) if costs is None else np.asarray(costs)
    # m·J lifts the vector of ones out of the way: λ₂ never exceeds m.
    constraints = [L + np.ones((m, m)) >> t * np.eye(m), p >= 0, p <= 1, c @ p <= limit]
    cp.Problem(cp.Maximize(t), constraints).solve(solver=cp.CLARABEL)
    return float(t.value)


@pytest.mark.parametrize("budget", [0.02, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("name", PAPER)
def test_reaches_the_optimum_of_a_general_solver(name, budget):
    matchings = families.paper_matchings(name)
    m, limit = families.paper(name).num_workers, budget * len(matchings)
    found = optimal_probabilities(matchings, m, limit)
    expected = cvxpy_optimum(matchings, m, limit)
    value = connectivity(matchings, found.probabilities, m)
    assert value == pytest.approx(expected, rel=1e-5)
    assert found.certificate.value == pytest.approx(value, rel=1e-9)
    assert found.certificate.bound >= expected * (1 - 1e-6)
    assert found.certificate.gap <= 1e-7
    assert sum(found.probabilities) <= limit + 1e-9


@settings(max_examples=80)
@given(
    topologies(max_workers=14),
    st.sampled_from([decompose, one_per_link]),
    st.sampled_from([0.001, 0.05, 0.3, 0.7, 0.99]),
)
def test_every_answer_is_certified(topology, split, budget):
    # One coin a link leaves many optimal answers: the ties on which interior points stumble.
    matchings = split(topology)
    limit = budget * len(decompose(topology))
    found = optimal_probabilities(matchings, topology.num_workers, limit)
    assert sum(found.probabilities) <= limit + 1e-9
    assert all(0.0 <= p <= 1.0 for p in found.probabilities)
    assert found.certificate.gap <= 1e-6


def test_a_search_may_pass_through_a_value_of_exactly_zero():
    links = [(0, 1), (0, 2), (0, 4), (1, 2), (1, 3), (1, 4), (1, 5), (1, 6), (2, 3), (3, 4), (3, 5)]
    matchings = decompose(Topology.from_links(links))
    found = optimal_probabilities(matchings, 7, 0.3 * len(matchings))
    assert found.certificate.gap <= 1e-7


def test_costs_weigh_in_the_limit():
    matchings = families.paper_matchings("er8")
    costs = [1.0, 2.0, 0.5, 3.0, 1.5]
    found = optimal_probabilities(matchings, 8, 3.0, costs=costs)
    assert np.dot(costs, found.probabilities) <= 3.0 + 1e-9
    expected = cvxpy_optimum(matchings, 8, 3.0, costs)
    assert found.certificate.value == pytest.approx(expected, rel=1e-5)


def test_a_group_shares_one_probability():
    matchings = families.paper_matchings("er8")
    found = optimal_probabilities(matchings, 8, 2.5, groups=[(0, 3), (1,), (2, 4)])
    p = found.probabilities
    assert p[0] == p[3]
    assert p[2] == p[4]
    assert sum(p) <= 2.5 + 1e-9
    free = optimal_probabilities(matchings, 8, 2.5)
    assert found.certificate.value <= free.certificate.bound
    merged = [matchings[0] + matchings[3], matchings[1], matchings[2] + matchings[4]]
    same = optimal_probabilities(merged, 8, 2.5, costs=[2, 1, 2])
    assert found.certificate.value == pytest.approx(same.certificate.value, rel=1e-6)


@pytest.mark.parametrize("limit", [5, 5.0, 7.0])
def test_a_limit_that_allows_everything_gives_exactly_one(limit):
    found = optimal_probabilities(families.paper_matchings("er8"), 8, limit)
    assert found.probabilities == (1.0,) * 5
    assert found.certificate.gap == 0.0


@pytest.mark.parametrize(
    ("topology", "expected"),
    [
        (families.star(40), 1.0),  # all leaves alike: λ₂ is their common weight
        (families.complete(9), 9.0),
        (families.hypercube(5), 2.0),
        (families.star(600), 1.0),
    ],
    ids=["star40", "complete9", "hypercube5", "star600"],
)
def test_symmetric_graphs_with_huge_eigenspaces_are_certified(topology, expected):
    found = optimal_probabilities(
        one_per_link(topology), topology.num_workers, 0.3 * len(topology.links)
    )
    assert found.certificate.value == pytest.approx(0.3 * expected, rel=1e-6)
    assert found.certificate.gap <= default_tolerance(topology.num_workers)


@pytest.mark.parametrize("side", [15, 40])
def test_large_graphs_keep_their_certificate(side):
    # 225 workers factorise; the bound must hold for any feasible point, so try some.
    topology = families.torus(side, side)
    rows = [link for link in topology.links if link[1] - link[0] in (1, side - 1)]
    columns = [link for link in topology.links if link not in set(rows)]
    found = optimal_probabilities([tuple(rows), tuple(columns)], topology.num_workers, 1.0)
    assert found.certificate.gap <= default_tolerance(topology.num_workers)
    ring = 2 - 2 * np.cos(2 * np.pi / side)
    assert found.certificate.value == pytest.approx(0.5 * ring, rel=1e-4)


@pytest.mark.parametrize(
    "topology",
    [
        families.star(60).with_link_times(np.linspace(1, 10, 59).tolist()),
        families.geometric(60, 0.25, seed=1),
        families.path(60),
    ],
    ids=["star with slow leaves", "all links of a geometric graph", "path"],
)
def test_many_coins_and_many_critical_directions(topology):
    matchings = one_per_link(topology)
    costs = topology.link_times or [1.0] * len(matchings)
    found = optimal_probabilities(matchings, 60, 0.3 * sum(costs), costs=costs)
    assert np.dot(costs, found.probabilities) <= 0.3 * sum(costs) + 1e-9
    assert found.certificate.gap <= 1e-5
    value = connectivity(matchings, found.probabilities, 60)
    assert found.certificate.value == pytest.approx(value, rel=1e-7)


def test_expanders_are_solved_by_products_alone():
    topology = families.erdos_renyi(300, 0.06, seed=3)
    rng = np.random.default_rng(0)
    owner = rng.integers(0, 6, len(topology.links))
    parts = [
        tuple(link for link, o in zip(topology.links, owner, strict=True) if o == g)
        for g in range(6)
    ]
    found = optimal_probabilities(parts, 300, 3.0)
    assert found.certificate.gap <= 1e-6
    value = connectivity(parts, found.probabilities, 300)
    assert found.certificate.value == pytest.approx(value, rel=1e-8)
    for _ in range(5):
        p = rng.random(6)
        assert connectivity(parts, p * min(1.0, 3.0 / p.sum()), 300) <= found.certificate.bound


def test_the_same_call_gives_the_same_digits_and_leaves_numpy_alone():
    topology = families.erdos_renyi(300, 0.06, seed=3)
    matchings = [*one_per_link(topology)[:29], tuple(topology.links[29:])]
    np.random.seed(1)  # noqa: NPY002
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    first = optimal_probabilities(matchings, 300, 5.0, tolerance=1e-2)
    again = optimal_probabilities(matchings, 300, 5.0, tolerance=1e-2)
    assert first.probabilities == again.probabilities
    assert (np.random.get_state()[1] == before).all()  # noqa: NPY002


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_a_limit_that_is_not_positive_is_refused(limit):
    with pytest.raises(InputError, match="must be positive"):
        optimal_probabilities([((0, 1),)], 2, limit)


def test_a_cost_that_is_not_positive_is_refused():
    with pytest.raises(InputError, match="positive, finite"):
        optimal_probabilities([((0, 1),), ((1, 2),)], 3, 1.0, costs=[1.0, 0.0])


def test_knapsack_fills_by_gain_per_cost():
    gains, costs = np.array([4.0, 3.0, 1.0]), np.array([4.0, 1.0, 1.0])
    assert knapsack_bound(gains, costs, 1.0) == 3.0
    assert knapsack_bound(gains, costs, 3.0) == 5.0
    assert knapsack_bound(gains, costs, 100.0) == 8.0


def test_a_huge_eigenspace_is_averaged_without_a_row_for_each_link(monkeypatch):
    """λ₂ of a complete graph belongs to m − 1 directions; both ways to average them agree."""
    for topology in (families.complete(40), families.hypercube(5)):
        matchings = one_per_link(topology)
        limit = 0.25 * len(matchings)
        gathered = optimal_probabilities(matchings, topology.num_workers, limit)
        with monkeypatch.context() as patch:
            patch.setattr("matcha.activation._GATHERED", 0)
            found = optimal_probabilities(matchings, topology.num_workers, limit)
        assert found.certificate.gap <= default_tolerance(topology.num_workers)
        np.testing.assert_allclose(found.probabilities, gathered.probabilities, atol=1e-6)
