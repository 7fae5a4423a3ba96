"""Eq. 9: the reference table, and E[WᵀW] by enumeration of all activations."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from matcha import families
from matcha._numerics.spectra import laplacian
from matcha.activation import optimal_probabilities
from matcha.errors import InputError
from matcha.mixing import (
    contraction_factor,
    is_doubly_stochastic,
    laplacian_extremes,
    moments,
    optimal_contraction,
    periodic_contraction,
    single_contraction,
    vanilla_contraction,
)
from matcha.topology import Topology

PAPER = ["er8", "geometric16-d5", "geometric16-d10", "geometric16-d13", "er16"]
TABLE = {
    0.02: (0.9885, 0.9986, 0.9885, 0.9623, 0.9858),
    0.1: (0.9368, 0.9921, 0.9353, 0.8087, 0.9224),
    0.3: (0.7765, 0.9717, 0.8117, 0.5492, 0.7646),
    0.5: (0.6440, 0.9531, 0.7577, 0.4538, 0.6755),
    0.6: (0.5773, 0.9445, 0.7601, 0.4408, 0.6668),
}
VANILLA = (0.6538, 0.9300, 0.7958, 0.4802, 0.7130)
PERIODIC = (0.8269, 0.9650, 0.8979, 0.7401, 0.8565)
EQUALS_VANILLA = (0.483, 1.0, 0.337, 0.414, 0.394)


def matcha_rho(name, budget):
    topology, matchings = families.paper(name), families.paper_matchings(name)
    m = topology.num_workers
    p = optimal_probabilities(matchings, m, budget * len(matchings)).probabilities
    return optimal_contraction(moments(matchings, p, m)).rho


@pytest.mark.parametrize("budget", TABLE)
@pytest.mark.parametrize("column", range(5), ids=PAPER)
def test_reference_table_of_matcha(column, budget):
    assert matcha_rho(PAPER[column], budget) == pytest.approx(TABLE[budget][column], abs=5e-4)


@pytest.mark.parametrize("column", range(5), ids=PAPER)
def test_reference_table_of_vanilla_and_periodic(column):
    topology = families.paper(PAPER[column])
    assert vanilla_contraction(topology).rho == pytest.approx(VANILLA[column], abs=5e-4)
    assert periodic_contraction(topology, 0.5).rho == pytest.approx(PERIODIC[column], abs=5e-4)


@pytest.mark.parametrize("column", range(5), ids=PAPER)
def test_budget_at_which_matcha_equals_vanilla(column):
    vanilla, budget = VANILLA[column], EQUALS_VANILLA[column]
    assert matcha_rho(PAPER[column], min(1.0, budget + 1e-3)) <= vanilla + 5e-4
    assert matcha_rho(PAPER[column], budget - 1e-2) > vanilla


def second_moment(matchings, p, m, alpha, groups):
    """E[WᵀW] by going through every outcome of the coins."""
    total = np.zeros((m, m))
    for outcome in product((False, True), repeat=len(groups)):
        chance, L = 1.0, np.zeros((m, m))
        for heads, group in zip(outcome, groups, strict=True):
            chance *= p[group[0]] if heads else 1.0 - p[group[0]]
            if heads:
                L += sum(laplacian(matchings[j], m).toarray() for j in group)
        W = np.eye(m) - alpha * L
        total += chance * W.T @ W
    return total


@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("groups", [(), ((0, 2), (1,), (3, 4))], ids=["coins", "groups"])
def test_rho_by_enumeration_of_all_activations(alpha, groups):
    matchings, m = families.paper_matchings("er8"), 8
    p = [0.9, 0.4, 0.9, 0.3, 0.3]
    coins = groups or tuple((j,) for j in range(5))
    W2 = second_moment(matchings, p, m, alpha, coins)
    expected = np.linalg.eigvalsh(W2 - 1.0 / m)[-1]
    found = contraction_factor(moments(matchings, p, m, groups), alpha)
    assert found == pytest.approx(expected, abs=1e-12)


@st.composite
def decompositions(draw):
    """A random connected graph with each link its own matching, and probabilities."""
    m = draw(st.integers(2, 6))
    tree = [(draw(st.integers(0, j - 1)), j) for j in range(1, m)]
    others = [(i, j) for i in range(m) for j in range(i + 1, m) if (i, j) not in tree]
    extra = draw(st.lists(st.sampled_from(others), unique=True, max_size=4)) if others else []
    matchings = [(link,) for link in sorted(tree + extra)]
    chances = st.floats(0.01, 1.0)
    p = draw(st.lists(chances, min_size=len(matchings), max_size=len(matchings)))
    return matchings, p, m


@settings(deadline=None, max_examples=40)
@given(decompositions(), st.floats(0.01, 1.0))
def test_formula_and_enumeration_agree_on_random_graphs(decomposition, alpha):
    matchings, p, m = decomposition
    W2 = second_moment(matchings, p, m, alpha, [(j,) for j in range(len(p))])
    expected = np.linalg.eigvalsh(W2 - 1.0 / m)[-1]
    # The formula leaves out the direction of ones, whose eigenvalue is zero.
    found = contraction_factor(moments(matchings, p, m), alpha)
    assert max(found, 0.0) == pytest.approx(max(expected, 0.0), abs=1e-10)


@settings(deadline=None, max_examples=40)
@given(decompositions())
def test_the_chosen_alpha_contracts_and_no_other_is_better(decomposition):
    matchings, p, m = decomposition
    both = moments(matchings, p, m)
    best = optimal_contraction(both)
    assert best.rho < 1.0
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        assert contraction_factor(both, best.alpha * factor) >= best.rho - 1e-9


@settings(deadline=None, max_examples=25)
@given(decompositions(), st.floats(0.0, 1.0), st.integers(0, 1023))
def test_mixing_matrices_are_symmetric_and_doubly_stochastic(decomposition, alpha, subset):
    matchings, _, m = decomposition
    active = [links for j, links in enumerate(matchings) if subset >> j & 1]
    W = np.eye(m) - alpha * sum((laplacian(links, m).toarray() for links in active), 0.0)
    assert (W.T == W).all()
    assert is_doubly_stochastic(W)


@pytest.mark.parametrize(
    "topology",
    [families.erdos_renyi(260, 0.04, seed=2), families.torus(15, 16), families.path(240)],
    ids=["expander", "torus", "path"],
)
def test_large_graphs_agree_with_dense_algebra(topology):
    m = topology.num_workers
    matchings = [topology.links[0::2], topology.links[1::2]]
    p = [0.7, 0.4]
    groups = ((0,), (1,))
    for both in (moments(matchings, p, m), moments(matchings, p, m, ((0, 1),))):
        mean = both.mean.toarray()
        best = optimal_contraction(both)
        B = np.eye(m) - 2 * best.alpha * mean - 1.0 / m
        B += best.alpha**2 * (mean @ mean + both.variance.toarray())
        assert best.rho == pytest.approx(np.linalg.eigvalsh(B)[-1], abs=1e-8)
        for factor in (0.9, 1.1):
            assert contraction_factor(both, best.alpha * factor) >= best.rho - 1e-9
    assert moments(matchings, p, m, groups).num_workers == m
    values = np.linalg.eigvalsh(topology.laplacian().toarray())
    assert laplacian_extremes(topology.laplacian(), topology) == pytest.approx(
        (values[1], values[-1]), rel=1e-6
    )


def test_vanilla_is_eq_9_with_all_probabilities_one():
    topology, matchings = families.paper("er16"), families.paper_matchings("er16")
    searched = optimal_contraction(moments(matchings, [1.0] * len(matchings), 16))
    closed = vanilla_contraction(topology)
    assert searched.alpha == pytest.approx(closed.alpha, rel=1e-6)
    assert searched.rho == pytest.approx(closed.rho, abs=1e-9)


def test_single_matching_closed_form_by_enumeration():
    matchings, m = families.paper_matchings("er8"), 8
    p = np.array([0.3, 0.1, 0.25, 0.2, 0.1])
    Ls = [laplacian(matching, m).toarray() for matching in matchings]
    mean = sum(q * L for q, L in zip(p, Ls, strict=True))

    def rho(alpha):
        W2 = (1 - p.sum()) * np.eye(m)
        for q, L in zip(p, Ls, strict=True):
            W = np.eye(m) - alpha * L
            W2 += q * W.T @ W
        return np.linalg.eigvalsh(W2 - 1.0 / m)[-1]

    closed = single_contraction(np.linalg.eigvalsh(mean)[1])
    assert closed.rho == pytest.approx(rho(closed.alpha), abs=1e-12)
    assert min(rho(0.45), rho(0.55)) > closed.rho


def test_is_doubly_stochastic_refuses_what_is_not():
    assert not is_doubly_stochastic([[0.5, 0.4], [0.5, 0.5]])
    assert not is_doubly_stochastic([[1.0, 0.0]])
    assert not is_doubly_stochastic([[np.nan, 1.0], [1.0, 0.0]])
    assert is_doubly_stochastic([[1.2, -0.2], [-0.2, 1.2]])
    assert not is_doubly_stochastic([[1.2, -0.2], [-0.2, 1.2]], signed=False)


def test_probabilities_must_match_the_matchings():
    with pytest.raises(InputError, match="2 probabilities were given for 1 matchings"):
        moments([((0, 1),)], [0.5, 0.5], 2)


def test_a_network_that_hardly_contracts_has_a_weight_too():
    """ρ is within the tolerance of 1, as on very long paths; a weight of 0 would be no plan."""
    found = optimal_contraction(moments([((0, 1),)], [1e-17], 2))
    assert found.alpha == pytest.approx(0.5)
    assert found.rho == 1.0


def test_two_workers():
    topology = Topology.from_links([(0, 1)])
    assert vanilla_contraction(topology).rho == pytest.approx(0.0)
    best = optimal_contraction(moments([((0, 1),)], [0.25], 2))
    assert (best.alpha, best.rho) == (pytest.approx(0.5), pytest.approx(0.75))
