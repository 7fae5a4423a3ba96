"""Topologies in files: JSON, GraphML, edge lists, adjacency matrices."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from matcha._io import MAX_BYTES
from matcha.errors import TopologyError
from matcha.topology import graphs
from matcha.topology.graphs import LinkList

_T = TypeVar("_T")
_TEXT = "utf-8-sig"  # spreadsheets and Windows editors put a mark before the first letter


def read(path: Path, make: Callable[[LinkList], _T]) -> _T:
    """What `make` makes of the links in a file; its ending says which format it is in.

    `.json` (ours, networkx's node-link data, or a plain list of links), `.graphml`, `.csv` and
    `.npy` (adjacency matrix), `.edges`, `.edgelist` and `.txt` (a link a line: two ends and, if
    all have it, seconds; `a -> b` on every line where links carry one way).

    Raises:
        TopologyError: The file is missing, unreadable, or does not hold a valid topology.
    """
    readers: dict[str, Callable[[Path], LinkList]] = {
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
        return make(reader(path))
    except TopologyError as error:
        raise TopologyError(f"{str(path)!r}: {error}") from None
    except (OSError, ValueError, OverflowError, EOFError, SyntaxError, RecursionError) as error:
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise TopologyError(
            f"{str(path)!r} could not be read as {path.suffix[1:].lower()}: {reason}"
        ) from None


def _read_json(path: Path) -> LinkList:
    return graphs.from_json(json.loads(path.read_text(encoding=_TEXT)))


def _read_graphml(path: Path) -> LinkList:
    import networkx as nx

    try:
        graph = nx.read_graphml(path)
    except nx.NetworkXError as error:
        raise ValueError(error) from None
    if all(str(node).lstrip("n").isdigit() for node in graph.nodes):
        numbers = {node: int(str(node).lstrip("n")) for node in graph.nodes}
        if set(numbers.values()) == set(range(len(numbers))):
            graph = nx.relabel_nodes(graph, numbers)
    return graphs.from_networkx(graphs.without_weights(graph), path.stem)


def _read_csv(path: Path) -> LinkList:
    lines = path.read_text(encoding=_TEXT).splitlines()
    if not any(line.split("#")[0].strip() for line in lines):
        raise TopologyError("it is empty: an adjacency matrix has a row for each worker.")
    return graphs.from_adjacency(np.loadtxt(lines, delimiter=",", ndmin=2), path.stem)


def _read_npy(path: Path) -> LinkList:
    return graphs.from_adjacency(np.load(path, allow_pickle=False), path.stem)


def _read_edges(path: Path) -> LinkList:
    rows: list[list[str]] = []
    directed = None
    for number, line in enumerate(path.read_text(encoding=_TEXT).splitlines(), start=1):
        words = line.split("#")[0].replace(",", " ").split()
        if not words:
            continue
        arrow = len(words) > 1 and words[1] == "->"
        if directed not in (None, arrow):
            raise TopologyError(f"line {number} differs: write a -> b on every line, or on none.")
        directed = arrow
        words = [word for word in words if word != "->"]
        if len(words) not in (2, 3):
            raise TopologyError(f"line {number} is not two workers (and seconds): {line[:60]!r}.")
        rows.append(words)
    integers = all(w.isdigit() for row in rows for w in row[:2])
    links = [(int(a), int(b)) if integers else (a, b) for a, b, *_ in rows]
    seconds = [float(row[2]) if len(row) == 3 else None for row in rows]
    times = graphs.times_of_all(list(zip(links, seconds, strict=True)))
    return LinkList(links=links, link_times=times, name=path.stem, directed=bool(directed))
