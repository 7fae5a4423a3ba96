"""Links as users hand them over: pairs of names that no topology has checked and numbered yet."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from matcha.errors import TopologyError

SCHEMA = "matcha.topology/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkList:
    """Pairs of workers and what is known about them: what `Topology.from_links` takes."""

    links: Sequence[Sequence[Any]]
    num_workers: int | None = None
    labels: Sequence[Hashable] | None = None
    link_times: Sequence[float] | None = None
    positions: Sequence[Sequence[float]] | None = None
    name: str = "custom"


def from_networkx(graph: Any, name: str | None = None) -> LinkList:
    """The links of a networkx graph, with edges' `time` and nodes' `pos` where all have them.

    Raises:
        TopologyError: The graph is directed or a multigraph.
    """
    if graph.is_directed():
        raise TopologyError(
            "the graph is directed but links carry both directions: pass graph.to_undirected()."
        )
    if graph.is_multigraph():
        raise TopologyError(
            "the graph is a multigraph but workers share at most one link: "
            "pass networkx.Graph(graph)."
        )
    edges = list(graph.edges(data=True))
    times = [data.get("time") for _, _, data in edges]
    points = [data.get("pos") for _, data in graph.nodes(data=True)]
    nodes = list(graph.nodes)
    if are_worker_numbers(nodes):
        points = [graph.nodes[i].get("pos") for i in range(len(nodes))]
        nodes = list(range(len(nodes)))
    return LinkList(
        links=[(a, b) for a, b, _ in edges],
        labels=nodes,
        link_times=None if not times or any(t is None for t in times) else times,
        positions=None if any(p is None for p in points) else points,
        name=name or str(graph.name or "networkx"),
    )


def from_adjacency(matrix: npt.NDArray[Any], name: str) -> LinkList:
    """A link wherever the entry of an adjacency matrix is not zero.

    Raises:
        TopologyError: The matrix is not square, symmetric, finite and non-negative.
    """
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise TopologyError(f"an adjacency matrix is square, but this one is {matrix.shape}.")
    if not np.isfinite(matrix).all() or (matrix < 0).any():
        raise TopologyError("an adjacency matrix has no negative weights and no NaN.")
    if not (matrix == matrix.T).all():
        i, j = np.argwhere(matrix != matrix.T)[0]
        raise TopologyError(f"the adjacency matrix is not symmetric at ({i}, {j}).")
    links = [(int(i), int(j)) for i, j in np.argwhere(matrix) if i <= j]
    return LinkList(links=links, num_workers=matrix.shape[0], name=name)


def from_json(document: Any) -> LinkList:
    """The links in a JSON document: ours, or a plain list of links.

    Raises:
        TopologyError: It is neither, or of another version.
    """
    if isinstance(document, list):
        return LinkList(links=[_link(entry) for entry in document])
    if not isinstance(document, dict) or "links" not in document:
        raise TopologyError('it is neither a list of links nor an object with "links".')
    schema = document.get("schema", SCHEMA)
    if schema != SCHEMA:
        raise TopologyError(f"its schema is {schema!r}, but {SCHEMA!r} is wanted.")
    links = [_link(entry) for entry in document["links"]]
    labels = document.get("labels")
    if labels is not None:
        labels = [tuple(x) if isinstance(x, list) else x for x in labels]
        links = [(_named(labels, i), _named(labels, j)) for i, j in links]
    return LinkList(
        links=links,
        num_workers=document.get("num_workers"),
        labels=labels,
        link_times=document.get("link_times"),
        positions=document.get("positions"),
        name=str(document.get("name", "custom")),
    )


def are_worker_numbers(names: Sequence[Hashable]) -> bool:
    """Whether names are 0, …, m − 1 already, in any order."""
    return all(isinstance(n, (int, np.integer)) and not isinstance(n, bool) for n in names) and set(
        names
    ) == set(range(len(names)))


def _named(labels: Sequence[Hashable], number: Any) -> Hashable:
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(labels):
        raise TopologyError(f"a link names worker {number!r}, but there are {len(labels)} labels.")
    return labels[number]


def _link(entry: Any) -> tuple[Any, Any]:
    if not isinstance(entry, (list, tuple)) or len(entry) != 2:
        raise TopologyError(f"a link is a pair of workers, but {entry!r} is not.")
    return entry[0], entry[1]
