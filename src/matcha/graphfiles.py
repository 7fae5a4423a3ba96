"""Topologies in files: JSON, GraphML, edge lists, adjacency matrices."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from matcha.errors import TopologyError
from matcha.topology import Topology

SCHEMA = "matcha.topology/1"
MAX_BYTES = 512 * 2**20


def read_topology(path: Path) -> Topology:
    """A topology from a file; its ending says which format it is in.

    `.json` (ours, or a plain list of links), `.graphml`, `.csv` and `.npy` (adjacency matrix),
    `.edges`, `.edgelist` and `.txt` (a link a line: two ends and, if all have it, seconds).

    Raises:
        TopologyError: The file is missing, unreadable, or does not hold a valid topology.
    """
    readers: dict[str, Callable[[Path], Topology]] = {
        ".json": _read_json,
        ".graphml": _read_graphml,
        ".xml": _read_graphml,
        ".csv": _read_csv,
        ".npy": _read_npy,
        ".edges": _read_edges,
        ".edgelist": _read_edges,
        ".txt": _read_edges,
    }
    if not path.is_file():
        raise TopologyError(f"there is no topology file {str(path)!r}.")
    if path.stat().st_size > MAX_BYTES:
        raise TopologyError(f"{str(path)!r} is larger than {MAX_BYTES >> 20} MiB: not a topology.")
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise TopologyError(
            f"{str(path)!r} has an unknown ending: topology files end in {', '.join(readers)}."
        )
    try:
        return reader(path)
    except TopologyError as error:
        raise TopologyError(f"{str(path)!r}: {error}") from None
    except (OSError, ValueError, EOFError, SyntaxError, RecursionError) as error:
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise TopologyError(
            f"{str(path)!r} could not be read as {path.suffix[1:].lower()}: {reason}"
        ) from None


def save_topology(topology: Topology, path: Path) -> None:
    """Write `topology` as JSON, through a temporary file so that nothing is left half written."""
    write_atomically(path, json.dumps(topology_to_json(topology), indent=1) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def topology_to_json(topology: Topology) -> dict[str, Any]:
    """The topology as plain JSON values."""
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "name": topology.name,
        "num_workers": topology.num_workers,
        "links": [list(link) for link in topology.links],
    }
    if topology.labels != tuple(range(topology.num_workers)):
        document["labels"] = [_plain_label(label) for label in topology.labels]
    if topology.link_times is not None:
        document["link_times"] = list(topology.link_times)
    if topology.positions is not None:
        document["positions"] = [list(point) for point in topology.positions]
    return document


def topology_from_json(document: Any) -> Topology:
    """The topology in a JSON document: ours, or a plain list of links."""
    if isinstance(document, list):
        return Topology.from_links([_link(entry) for entry in document])
    if not isinstance(document, dict) or "links" not in document:
        raise TopologyError('it is neither a list of links nor an object with "links".')
    schema = document.get("schema", SCHEMA)
    if schema != SCHEMA:
        raise TopologyError(f"its schema is {schema!r}, but {SCHEMA!r} is wanted.")
    labels = document.get("labels")
    topology = Topology.from_links(
        [_link(entry) for entry in document["links"]],
        document.get("num_workers"),
        link_times=document.get("link_times"),
        positions=document.get("positions"),
        name=str(document.get("name", "custom")),
    )
    if labels is None:
        return topology
    return Topology(
        num_workers=topology.num_workers,
        links=topology.links,
        labels=tuple(tuple(x) if isinstance(x, list) else x for x in labels),
        link_times=topology.link_times,
        positions=topology.positions,
        name=topology.name,
    )


def _plain_label(label: Any) -> Any:
    if isinstance(label, (str, int, float, bool)) or label is None:
        return label
    if isinstance(label, tuple):
        return [_plain_label(part) for part in label]
    return str(label)


def _link(entry: Any) -> tuple[Any, Any]:
    if not isinstance(entry, (list, tuple)) or len(entry) != 2:
        raise TopologyError(f"a link is a pair of workers, but {entry!r} is not.")
    return entry[0], entry[1]


def _read_json(path: Path) -> Topology:
    return topology_from_json(json.loads(path.read_text(encoding="utf-8")))


def _read_graphml(path: Path) -> Topology:
    import networkx as nx

    try:
        graph = nx.read_graphml(path)
    except nx.NetworkXError as error:
        raise ValueError(error) from None
    if all(str(node).lstrip("n").isdigit() for node in graph.nodes):
        numbers = {node: int(str(node).lstrip("n")) for node in graph.nodes}
        if set(numbers.values()) == set(range(len(numbers))):
            graph = nx.relabel_nodes(graph, numbers)
    return Topology.from_networkx(graph, name=path.stem)


def _read_csv(path: Path) -> Topology:
    return _from_adjacency(np.loadtxt(path, delimiter=",", ndmin=2), path.stem)


def _read_npy(path: Path) -> Topology:
    return _from_adjacency(np.load(path, allow_pickle=False), path.stem)


def _from_adjacency(matrix: npt.NDArray[Any], name: str) -> Topology:
    """A link wherever the entry is not zero."""
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise TopologyError(f"an adjacency matrix is square, but this one is {matrix.shape}.")
    if not np.isfinite(matrix).all() or (matrix < 0).any():
        raise TopologyError("an adjacency matrix has no negative weights and no NaN.")
    if not (matrix == matrix.T).all():
        i, j = np.argwhere(matrix != matrix.T)[0]
        raise TopologyError(f"the adjacency matrix is not symmetric at ({i}, {j}).")
    links = [(int(i), int(j)) for i, j in np.argwhere(matrix) if i <= j]
    return Topology.from_links(links, matrix.shape[0], name=name)


def _read_edges(path: Path) -> Topology:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        words = line.split("#")[0].replace(",", " ").split()
        if not words:
            continue
        if len(words) not in (2, 3):
            raise TopologyError(f"line {number} is not two workers (and seconds): {line[:60]!r}.")
        rows.append(words)
    integers = all(w.isdigit() for row in rows for w in row[:2])
    links = [(int(a), int(b)) if integers else (a, b) for a, b, *_ in rows]
    timed = bool(rows) and all(len(row) == 3 for row in rows)
    times = [float(row[2]) for row in rows] if timed else None
    return Topology.from_links(links, link_times=times, name=path.stem)
