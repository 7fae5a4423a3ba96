"""Links as users hand them over: pairs of names that no topology has checked and numbered yet."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from matcha.errors import TopologyError

SCHEMA = "matcha.topology/1"
Weight: TypeAlias = Literal["time", "ignore"]
"""What the weight of a link means: the seconds of one exchange, or nothing."""
WEIGHTS = (
    "its links carry 'weight', which may mean anything: say weight='time' if it is the seconds of "
    "one exchange (or rename it 'time'), or weight='ignore'."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkList:
    """Pairs of workers and what is known about them: what `Topology.from_links` takes."""

    links: Sequence[Sequence[Any]]
    num_workers: int | None = None
    labels: Sequence[Hashable] | None = None
    link_times: Sequence[float] | None = None
    link_latencies: Sequence[float] | None = None
    positions: Sequence[Sequence[float]] | None = None
    name: str = "custom"
    directed: bool = False


def from_networkx(graph: Any, name: str | None = None, weight: Weight | None = None) -> LinkList:
    """The links of a networkx graph, with edges' `time` and, where all have it, nodes' `pos`.

    Raises:
        TopologyError: The graph is a multigraph, only some edges have a time, or edges have
            different weights and nothing says what they mean.
    """
    if graph.is_multigraph():
        raise TopologyError(
            "the graph is a multigraph but workers share at most one link: "
            "pass networkx.Graph(graph), or DiGraph where links carry one way."
        )
    edges = list(graph.edges(data=True))
    key = "weight" if weight == "time" else "time"
    timed = any("time" in data for _, _, data in edges)
    differ = len({data.get("weight") for _, _, data in edges}) > 1
    if weight is None and differ and not timed:
        raise TopologyError(WEIGHTS)  # seconds, a bandwidth or a likeness: its author knows
    points = [data.get("pos") for _, data in graph.nodes(data=True)]
    nodes = list(graph.nodes)
    if are_worker_numbers(nodes):
        points = [graph.nodes[i].get("pos") for i in range(len(nodes))]
        nodes = list(range(len(nodes)))
    return LinkList(
        links=[(a, b) for a, b, _ in edges],
        labels=nodes,
        link_times=times_of_all([((a, b), data.get(key)) for a, b, data in edges]),
        positions=None if any(p is None for p in points) else points,
        name=name or str(graph.name or "networkx"),
        directed=graph.is_directed(),
    )


def times_of_all(
    timed: Sequence[tuple[tuple[Any, Any], float | None]],
) -> list[float] | None:
    """Seconds for each link, or None where no link has them.

    Raises:
        TopologyError: Only some links have them; names one that has not.

    >>> times_of_all([((0, 1), 0.5), ((1, 2), 0.25)])
    [0.5, 0.25]
    """
    times = [seconds for _, seconds in timed if seconds is not None]
    if times and len(times) < len(timed):
        a, b = next(link for link, seconds in timed if seconds is None)
        raise TopologyError(
            f"{len(times)} of {len(timed)} links have a time and link ({a!r}, {b!r}) has none: "
            "give all links their seconds, or none."
        )
    return times or None


def from_adjacency(matrix: npt.NDArray[Any], name: str) -> LinkList:
    """A link wherever the entry of an adjacency matrix is not zero.

    Entries of 0 and 1 say only who is linked; any others are the links' seconds. Where the matrix
    is not symmetric the topology is directed: row i, column j is the link from i to j.

    Raises:
        TopologyError: The matrix is not square, finite and non-negative.
    """
    if matrix.dtype.kind not in "biuf":
        raise TopologyError(f"an adjacency matrix holds numbers, but this one is {matrix.dtype}.")
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise TopologyError(f"an adjacency matrix is square, but this one is {matrix.shape}.")
    if not np.isfinite(matrix).all() or (matrix < 0).any():
        raise TopologyError(
            "an adjacency matrix has no negative, infinite or missing (NaN) entries."
        )
    directed = not (matrix == matrix.T).all()
    links = [(int(i), int(j)) for i, j in np.argwhere(matrix) if directed or i <= j]
    seconds = [float(matrix[link]) for link in links]
    return LinkList(
        links=links,
        num_workers=matrix.shape[0],
        link_times=None if set(seconds) <= {1.0} else seconds,
        name=name,
        directed=directed,
    )


def from_json(document: Any, weight: Weight | None = None) -> LinkList:
    """The links in a JSON document: ours, networkx's node-link data, or a plain list of links.

    A link of the list is a pair of workers, or a pair and its seconds.

    Raises:
        TopologyError: It is none of them, or of another version.
    """
    if isinstance(document, list):
        timed = [_timed_link(entry) for entry in document]
        return LinkList(links=[link for link, _ in timed], link_times=times_of_all(timed))
    if not isinstance(document, dict) or not {"links", "edges"} & document.keys():
        raise TopologyError('it is neither a list of links nor an object with "links".')
    if "nodes" in document:
        return _from_node_link(document, weight)
    if "links" not in document:
        raise TopologyError('it has "edges" but no "nodes": node-link data has both.')
    schema = document.get("schema", SCHEMA)
    if schema != SCHEMA:
        raise TopologyError(f"its schema is {schema!r}, but {SCHEMA!r} is wanted.")
    links = [_link(entry) for entry in _list(document, "links") or ()]
    labels = _list(document, "labels")
    if labels is not None:
        labels = [_label(name) for name in labels]
        links = [(_named(labels, i), _named(labels, j)) for i, j in links]
    return LinkList(
        links=links,
        num_workers=_count(document.get("num_workers"), len(links)),
        labels=labels,
        link_times=_numbers(document, "link_times"),
        link_latencies=_numbers(document, "link_latencies"),
        positions=_points(document),
        name=str(document.get("name", "custom")),
        directed=_flag(document, "directed"),
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


def _list(document: dict[str, Any], key: str) -> list[Any] | None:
    value = document.get(key)
    if value is not None and not isinstance(value, list):
        raise TopologyError(f"its {key} are {value!r:.60}, but they are a list.")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _numbers(document: dict[str, Any], key: str) -> list[float] | None:
    values = _list(document, key)
    for value in values or ():
        if not _is_number(value):
            raise TopologyError(f"its {key} hold {value!r:.60}, but they are numbers.")
    return values


def _points(document: dict[str, Any]) -> list[list[float]] | None:
    points = _list(document, "positions")
    for point in points or ():
        if not (isinstance(point, list) and len(point) == 2 and all(map(_is_number, point))):
            raise TopologyError(f"its positions hold {point!r:.60}, but they are pairs [x, y].")
    return points


def _flag(document: dict[str, Any], key: str) -> bool:
    value = document.get(key, False)
    if not isinstance(value, bool):
        raise TopologyError(f"its {key!r} is {value!r:.60}, but it is true or false.")
    return value


def _label(name: Any) -> Hashable:
    """A worker's name as `plain_label` wrote it."""
    if isinstance(name, list):
        return tuple(_label(part) for part in name)
    if not isinstance(name, (str, int, float)):
        raise TopologyError(f"its labels hold {name!r:.60}, which is not a name.")
    return name


def _count(value: Any, num_links: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 2:
        raise TopologyError(f"num_workers is {value!r}, but it is a whole number from 2 up.")
    # Before a list of all of them is made: a file may name billions.
    if value > num_links + 1:
        raise TopologyError(
            f"{value:,} workers need at least {value - 1:,} links to be connected, but there are "
            f"{num_links:,}: add links, or leave num_workers out."
        )
    return value


def _from_node_link(document: dict[str, Any], weight: Weight | None) -> LinkList:
    """What `networkx.node_link_data` wrote, with its links under "edges" or "links"."""
    import networkx as nx

    edges = "edges" if "edges" in document else "links"
    try:
        # Who writes it by hand leaves these out and means neither; networkx would take both.
        simple = {"directed": False, "multigraph": False, **document}
        graph = nx.node_link_graph(simple, edges=edges)
        known = {_hashable(node["id"]) for node in document["nodes"]}
    except (KeyError, TypeError, AttributeError, nx.NetworkXError):
        raise TopologyError(
            'its "nodes" and links are not networkx node-link data: a node needs an "id", '
            'a link a "source" and a "target".'
        ) from None
    strange = [node for node in graph.nodes if node not in known]
    if strange:
        raise TopologyError(f"a link names {strange[0]!r}, which is not among its nodes.")
    return from_networkx(graph, weight=weight)


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def _timed_link(entry: Any) -> tuple[tuple[Any, Any], float | None]:
    if not isinstance(entry, (list, tuple)) or len(entry) not in (2, 3):
        raise TopologyError(f"a link is a pair of workers (and seconds), but {entry!r} is not.")
    if len(entry) == 2:
        return _link(entry), None
    seconds = entry[2]
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TopologyError(f"link {entry!r} ends in its seconds, but {seconds!r} is not a number.")
    return _link(entry[:2]), float(seconds)


def _link(entry: Any) -> tuple[Any, Any]:
    if not isinstance(entry, (list, tuple)) or len(entry) != 2:
        raise TopologyError(f"a link is a pair of workers, but {entry!r} is not.")
    return entry[0], entry[1]


def plain_label(label: Any) -> Any:
    """A worker's name as JSON can hold it."""
    if isinstance(label, (str, int, float, bool)) or label is None:
        return label
    if isinstance(label, tuple):
        return [plain_label(part) for part in label]
    return str(label)
