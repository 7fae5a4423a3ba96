"""Networks for the search, with links that all take one unit of time."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from matcha import Topology
from matcha.strategies.greedy.candidates import SearchNetwork


def network(topology: Topology, rate: Fraction, *, directed: bool = False) -> SearchNetwork:
    """The links of a topology; where messages go one way, both ways of each."""
    arrows = np.array([(receiver, sender) for sender, receiver in topology.arrows])
    links = arrows if directed else topology.link_array
    return SearchNetwork(
        num_workers=topology.num_workers,
        links=links,
        times=(Fraction(1),) * len(links),
        rate=rate,
        directed=directed,
    )
