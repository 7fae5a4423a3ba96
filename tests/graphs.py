"""Random connected graphs for property tests."""

from __future__ import annotations

import networkx as nx
from hypothesis import strategies as st

from matcha import Topology


@st.composite
def topologies(draw: st.DrawFn, max_workers: int = 12) -> Topology:
    """Random connected graphs: a random tree plus random extra links."""
    m = draw(st.integers(2, max_workers))
    links = {(draw(st.integers(0, i - 1)), i) for i in range(1, m)}
    spare = [(i, j) for i in range(m) for j in range(i + 1, m) if (i, j) not in links]
    if spare:
        links |= set(draw(st.lists(st.sampled_from(spare), unique=True, max_size=2 * m)))
    topology = Topology.from_links(sorted(links))
    assert nx.is_connected(topology.to_networkx())
    return topology
