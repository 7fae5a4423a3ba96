"""Averaging: what an exact average over all workers costs, by a ring all-reduce as DDP does it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from matcha.timing import Timing
from matcha.topology import Link, Topology


def all_reduce_time(
    timing: Timing, topology: Topology, slower: Mapping[Link, float] | None = None
) -> float:
    """The time of a ring all-reduce of a whole model, in the delay model's unit.

    In 2(m − 1) steps every worker sends 1/m of the model to the next and takes 1/m from the one
    before, all at once, so it takes 2(m − 1)/m times the slowest hop. Without link times any two
    workers are one exchange apart, as behind a switch; with them a hop follows the quickest path
    of links, in the best order of workers found, and what hops share is not charged twice. Both
    flatter the all-reduce, which others are compared with. Some links may be `slower` by factors.

    >>> from matcha.timing import Units
    >>> from matcha.topology import families
    >>> all_reduce_time(Units(), families.ring(8))
    1.75
    """
    m = topology.num_workers
    factors = tuple(sorted(slower.items())) if slower else ()
    # Delay models are values.
    hop: float = _slowest_hop(timing, topology, factors)  # type: ignore[arg-type]
    return 2 * (m - 1) / m * hop


@lru_cache(maxsize=64)
def _slowest_hop(
    timing: Timing, topology: Topology, factors: tuple[tuple[Link, float], ...]
) -> float:
    slower = dict(factors)
    seconds = {
        link: timing.matching_time((link,)) * slower.get(link, 1.0) for link in topology.links
    }
    if topology.link_times is None:
        return max(seconds.values())
    import networkx as nx

    graph = nx.Graph()
    graph.add_weighted_edges_from((i, j, seconds[i, j]) for i, j in topology.links)
    tree = nx.minimum_spanning_tree(graph)
    # Of a tree's workers in the order of a walk, neighbours in the order are near one another.
    order = list(nx.dfs_preorder_nodes(tree, source=min(graph)))
    hops: list[Link] = list(zip(order, [*order[1:], order[0]], strict=True))
    return max(float(nx.dijkstra_path_length(graph, i, j)) for i, j in hops)
