"""Shared strategies and settings of the tests."""

from __future__ import annotations

import os
from pathlib import Path

import networkx as nx
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from matcha import Topology

# Subprocesses of tests find the package under test, installed or not.
SOURCE = str(Path(__file__).parent.parent / "src")
os.environ["PYTHONPATH"] = os.pathsep.join(
    part for part in (SOURCE, os.environ.get("PYTHONPATH", "")) if part
)
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile(
    "matcha", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("matcha")


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
