"""Decompositions: never more than Δ+1 matchings, and verifiers that name what is wrong."""

from itertools import pairwise

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.graphs import topologies

from matcha import Topology, families
from matcha.errors import PlanError, TopologyError
from matcha.matchings import (
    Coloring,
    _misra_gries,
    check_decomposition,
    cliques,
    color_links,
    decompose,
    is_clique_partition,
    is_decomposition,
    is_matching,
    single_links,
)

PAPER = ["er8", "geometric16-d5", "geometric16-d10", "geometric16-d13", "er16"]


@settings(max_examples=150)
@given(topologies(max_workers=14))
def test_a_decomposition_verifies_and_has_at_most_one_matching_too_many(topology):
    matchings = decompose(topology)
    assert is_decomposition(topology, matchings)
    assert topology.max_degree <= len(matchings) <= topology.max_degree + 1
    if nx.is_bipartite(topology.to_networkx()):  # König: Δ is enough
        assert len(matchings) == topology.max_degree


@given(topologies(max_workers=12))
def test_misra_gries_is_the_guarantee(topology):
    matchings = [matching for matching in _misra_gries(topology) if matching]
    assert is_decomposition(topology, matchings)
    assert len(matchings) <= topology.max_degree + 1


@pytest.mark.parametrize("name", PAPER)
def test_the_paper_graphs_need_no_more_than_their_degree(name):
    topology = families.paper(name)
    assert len(decompose(topology)) == topology.max_degree
    assert is_decomposition(topology, families.paper_matchings(name))


@pytest.mark.parametrize(
    ("topology", "colors"),
    [
        (families.complete(8), 7),
        (families.complete(9), 9),  # odd complete graphs are overfull
        (families.complete(48), 47),  # which the search does not find
        (families.complete(64), 63),
        (families.complete(129), 129),
        (families.complete(130), 129),
        (families.ring(6), 2),
        (families.ring(7), 3),
        (families.hypercube(7), 7),
        (families.star(500), 499),
        (families.torus(5, 7), 5),
        (families.barbell(20), 10),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_known_chromatic_indices(topology, colors):
    matchings = decompose(topology)
    assert len(matchings) == colors
    assert is_decomposition(topology, matchings)


def test_the_petersen_graph_needs_one_more_than_its_degree():
    topology = Topology.from_networkx(nx.petersen_graph())
    assert len(decompose(topology)) == 4


@settings(max_examples=60)
@given(st.data(), topologies(max_workers=10))
def test_slow_links_are_put_together(data, topology):
    slow = data.draw(st.lists(st.booleans(), min_size=len(topology.links)))
    times = [10.0 if s else 1.0 for s in slow[: len(topology.links)]]
    timed = topology.with_link_times(times)
    matchings = decompose(timed)
    assert is_decomposition(timed, matchings)
    assert len(matchings) <= topology.max_degree + 1
    cost = dict(zip(timed.links, times, strict=True))

    def total(some):
        return sum(max(cost[link] for link in matching) for matching in some)

    assert total(matchings) <= total(decompose(topology)) or len(matchings) < len(
        decompose(topology)
    )


def test_one_slow_worker_costs_its_degree_and_no_more():
    topology = families.complete(6)
    timed = topology.with_link_times([10.0 if 0 in link else 1.0 for link in topology.links])
    assert len(decompose(timed)) == 5
    path = families.path(5).with_link_times([1.0, 10.0, 1.0, 10.0])
    assert decompose(path) == (((1, 2), (3, 4)), ((0, 1), (2, 3)))


def test_a_few_slow_workers_cost_little_more_than_their_own_links():
    topology = families.paper("geometric16-d13")
    timed = topology.with_link_times([10.0 if 3 in link else 1.0 for link in topology.links])
    seconds = sum(10.0 if any(3 in link for link in m) else 1.0 for m in decompose(timed))
    degree = topology.degrees[3]  # its links are in as many matchings, whatever we do
    assert seconds == 10.0 * degree + (13 - degree)


@pytest.mark.parametrize("seed", range(3))
def test_random_link_times_are_grouped_well(seed):
    topology = families.paper("geometric16-d10")
    times = np.random.default_rng(seed).exponential(size=len(topology.links))
    timed = topology.with_link_times(times.tolist())
    cost = dict(zip(timed.links, times, strict=True))
    plain, grouped = (
        sum(max(cost[e] for e in matching) for matching in decompose(some))
        for some in (topology, timed)
    )
    # The busiest worker's links are in different matchings: no decomposition beats their sum.
    least = max(sum(cost[e] for e in timed.links if w in e) for w in range(16))
    assert least - 1e-9 <= grouped < 0.8 * plain


@given(topologies(max_workers=12))
def test_cliques_partition_the_links(topology):
    matchings, groups = cliques(topology)
    assert is_clique_partition(topology, matchings, groups)


def test_cliques_of_a_barbell_are_its_two_halves_and_the_bridge():
    _, groups = cliques(families.barbell(10))
    assert len(groups) == 3


def test_clique_verifier_refuses_what_is_no_clique():
    path = families.path(4)
    matchings = (((0, 1), (2, 3)), ((1, 2),))
    assert not is_clique_partition(path, matchings, ((0,), (1,)))
    assert not is_clique_partition(path, single_links(path), ((0,), (1,)))
    assert not is_clique_partition(path, (((0, 1),),), ((0,),))
    assert is_clique_partition(path, single_links(path), ((0,), (1,), (2,)))


def test_single_links_decompose():
    topology = families.paper("er16")
    assert is_decomposition(topology, single_links(topology))


@pytest.mark.parametrize(
    ("matchings", "sentence"),
    [
        ([((0, 1), (1, 2)), ((0, 2),)], "matching 0 uses worker 1 twice"),
        ([((0, 1),), ((1, 2),), ((0, 3),)], r"\(0, 3\)"),
        ([((0, 1),), ((1, 2),)], r"link \(0, 2\) is in no matching"),
        ([((0, 1),), ((1, 2),), ((0, 2),), ((0, 1),)], r"link \(0, 1\) is in two matchings"),
        ([((0, 1),), ((1, 2),), ((0, 2),), ()], "matching 3 is empty"),
    ],
    ids=["shares", "foreign", "missing", "twice", "empty"],
)
def test_bad_decompositions_are_refused_with_the_culprit(matchings, sentence):
    triangle = Topology.from_links([(0, 1), (1, 2), (0, 2)])
    with pytest.raises(PlanError, match=sentence):
        check_decomposition(triangle, matchings)
    assert not is_decomposition(triangle, matchings)


def test_is_matching():
    assert is_matching([])
    assert not is_matching([(0, 1), (0, 2)])


def test_the_input_and_the_global_random_state_are_left_alone():
    topology = families.erdos_renyi(40, 0.3, seed=5)
    np.random.seed(3)  # noqa: NPY002
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    assert decompose(topology, seed=1) == decompose(topology, seed=1)
    assert (np.random.get_state()[1] == before).all()  # noqa: NPY002


# -- colourings under construction -----------------------------------------------------------------


@given(topologies(max_workers=10), st.integers(0, 2**32 - 1))
def test_exchanges_keep_the_decomposition_proper(topology, seed):
    coloring = Coloring.from_matchings(decompose(topology), topology.num_workers)
    rng = np.random.default_rng(seed)
    for _ in range(10):
        if coloring.num_colors < 2:
            return
        a, b = (int(c) for c in rng.choice(coloring.num_colors, size=2, replace=False))
        worker = int(rng.integers(topology.num_workers))
        coloring.exchange(coloring.chain(worker, a, b), a, b)
        assert is_decomposition(topology, [m for m in coloring.matchings() if m])


@given(topologies(max_workers=10))
def test_chains_of_two_colors_hold_each_of_their_links_once(topology):
    coloring = Coloring.from_matchings(decompose(topology), topology.num_workers)
    if coloring.num_colors < 2:
        return
    links = []
    for chain in coloring.chains(0, 1):
        links += [tuple(sorted(pair)) for pair in pairwise(chain)]
    expected = [*coloring.matchings()[0], *coloring.matchings()[1]]
    assert sorted(links) == sorted(expected)


def test_a_cycle_ends_where_it_began():
    coloring = Coloring.from_matchings(decompose(families.ring(6)), 6)
    chain = coloring.chain(2, 0, 1)
    assert chain[0] == chain[-1] == 2
    assert len(chain) == 7


def test_too_few_colors_is_said_not_forced():
    assert color_links(families.complete(5).links, 5, 4) is None
    assert color_links(families.ring(5).links, 5, 2) is None
    found = color_links(families.ring(5).links, 5, 3)
    assert found is not None
    assert is_decomposition(families.ring(5), found.matchings())


def test_a_table_beyond_all_memory_is_refused_before_it_is_made():
    with pytest.raises(TopologyError, match="take 8,000 GB to split into matchings"):
        Coloring(1_000_000, 1_000_000)
