"""Kempe chains: exchanges keep a colouring proper."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.graphs import topologies

from matcha import families
from matcha.errors import TopologyError
from matcha.matchings import decompose, is_decomposition
from matcha.matchings.coloring import Coloring, color_links


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
