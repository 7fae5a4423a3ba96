"""Topologies in files: JSON, GraphML, edge lists, adjacency matrices."""

from __future__ import annotations

import csv
import json
import tokenize
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from matcha._io import MAX_BYTES
from matcha.errors import TopologyError
from matcha.topology import graphs
from matcha.topology.graphs import LinkList, Weight

_UNREADABLE = (
    *(ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, OSError, RecursionError),
    *(SyntaxError, TypeError, ValueError, tokenize.TokenError),
)
"""What readers of common formats raise where a file was changed."""
_SOURCES = ("source", "src", "from", "start", "node1", "worker1")
_TARGETS = ("target", "dst", "destination", "to", "end", "node2", "worker2")
_SECONDS = ("time", "times", "seconds", "link_time")
_EXPECTED = (
    "a table is an adjacency matrix, with or without names in its first row and column, or a list "
    "of links: two workers per row and, if all have them, seconds, below a header such as "
    "source,target,time or none."
)
_TEXT = "utf-8-sig"  # spreadsheets and Windows editors put a mark before the first letter


def read(path: Path, weight: Weight | None = None) -> LinkList:
    """The links in a file; its ending says which format it is in.

    `.json` (ours, networkx's node-link data, or a plain list of links), `.graphml`, `.csv` (an
    adjacency matrix or a list of links), `.npy` (adjacency matrix), `.edges`, `.edgelist` and
    `.txt` (a link per line: two ends and, if all have it, seconds; `a -> b` on every line where
    links carry one way).

    Raises:
        TopologyError: The file is missing, unreadable, or does not hold a valid topology.
    """
    readers: dict[str, Callable[[Path, Weight | None], LinkList]] = {
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
    return reader(path, weight)


@contextmanager
def explain(path: Path) -> Iterator[None]:
    """Say in one sentence, with the file's name, what is wrong with what was read from it.

    Raises:
        TopologyError: Whatever a reader raised.
    """
    try:
        yield
    except TopologyError as error:
        raise TopologyError(f"{str(path)!r}: {error}") from None
    except _UNREADABLE as error:
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise TopologyError(
            f"{str(path)!r} could not be read as {path.suffix[1:].lower()}: {reason}"
        ) from None


def _read_json(path: Path, weight: Weight | None) -> LinkList:
    return graphs.from_json(json.loads(path.read_text(encoding=_TEXT)), weight)


def _read_graphml(path: Path, weight: Weight | None) -> LinkList:
    import networkx as nx

    try:
        graph = nx.read_graphml(path)
    except nx.NetworkXError as error:
        raise ValueError(error) from None
    if all(str(node).lstrip("n").isdigit() for node in graph.nodes):
        numbers = {node: int(str(node).lstrip("n")) for node in graph.nodes}
        if set(numbers.values()) == set(range(len(numbers))):
            graph = nx.relabel_nodes(graph, numbers)
    return graphs.from_networkx(graph, path.stem, weight)


def _read_npy(path: Path, weight: Weight | None) -> LinkList:
    return graphs.from_adjacency(np.load(path, allow_pickle=False), path.stem)


# -- tables ---------------------------------------------------------------------------------------


def _read_csv(path: Path, weight: Weight | None) -> LinkList:
    """An adjacency matrix, with or without names, or a list of links, with or without a header."""
    text = [line for line in path.read_text(encoding=_TEXT).splitlines() if line.strip()]
    lines = [line for line in text if not line.lstrip().startswith("#")]
    if not lines:
        raise TopologyError("it is empty: a table has a row for each worker, or for each link.")
    delimiter = next((d for d in ",;\t" if d in lines[0]), ",")
    rows = list(csv.reader(lines, delimiter=delimiter, skipinitialspace=True))
    rows = [[cell.split("#")[0].strip() for cell in row] for row in rows]
    if len({len(row) for row in rows}) > 1:
        raise TopologyError(f"its rows differ in length: {_EXPECTED}")
    matrix = _as_matrix(rows, path.stem)
    return _as_links(rows, path.stem, weight) if matrix is None else matrix


def _as_matrix(rows: list[list[str]], name: str) -> LinkList | None:
    """The adjacency matrix in a table; None where it is a list of links."""
    labels: list[str] | None = None
    framed = len(rows) > 1 and rows[0][1:] == [row[0] for row in rows[1:]]
    if framed and not _is_number(rows[0][0]):
        labels, cells = rows[0][1:], [row[1:] for row in rows[1:]]  # as pandas writes a frame
        if not all(map(_is_number, (cell for row in cells for cell in row))):
            return None
    elif len(rows) == len(rows[0]) + 1 and not any(map(_is_number, rows[0])):
        labels, cells = rows[0], rows[1:]
    else:
        cells = rows
    if len(cells) != len(cells[0]) or not all(_is_number(cell) for row in cells for cell in row):
        if len(rows[0]) in (2, 3) or _columns(rows[0]) is not None:
            return None
        raise TopologyError(_EXPECTED)
    matrix = np.array(cells, dtype=np.float64)
    if labels is None and len(cells) in (2, 3) and matrix.diagonal().any():
        return None  # two or three links between numbers
    found = graphs.from_adjacency(matrix, name)
    if labels is None or set(labels) == {str(i) for i in range(len(labels))}:
        return found
    named = [(labels[i], labels[j]) for i, j in found.links]
    return replace(found, links=named, labels=labels, num_workers=None)


def _as_links(rows: list[list[str]], name: str, weight: Weight | None) -> LinkList:
    columns = _columns(rows[0])
    if columns is None:
        columns = (0, 1, 2 if len(rows[0]) == 3 else None, False)
    else:
        rows = rows[1:]
    source, target, seconds, is_weight = columns
    words = [[row[source], row[target]] for row in rows]
    values = None if seconds is None else [row[seconds] for row in rows]
    if values is not None and is_weight and weight != "time":
        if weight is None and len(set(values)) > 1:
            raise TopologyError(graphs.WEIGHTS)
        values = None
    return _links(words, values or [""] * len(rows), name)


def _columns(header: list[str]) -> tuple[int, int, int | None, bool] | None:
    """Where a header has both ends, and the seconds or the weight; None: it is not a header."""
    names = [cell.lower() for cell in header]

    def place(known: tuple[str, ...]) -> int | None:
        return next((names.index(name) for name in known if name in names), None)

    source, target = place(_SOURCES), place(_TARGETS)
    if source is None or target is None or source == target:
        return None
    seconds = place(_SECONDS)
    heavy = place(("weight", "weights"))
    return source, target, heavy if seconds is None else seconds, seconds is None


def _read_edges(path: Path, weight: Weight | None) -> LinkList:
    ends, seconds = [], []
    directed = None
    for number, line in enumerate(path.read_text(encoding=_TEXT).splitlines(), start=1):
        words = _words(line)
        if not words:
            continue
        arrow = len(words) > 1 and words[1] == "->"
        if directed not in (None, arrow):
            raise TopologyError(f"line {number} differs: write a -> b on every line, or on none.")
        directed = arrow
        words = [word for word in words if word != "->"]
        if len(words) not in (2, 3):
            raise TopologyError(f"line {number} is not two workers (and seconds): {line[:60]!r}.")
        ends.append(words[:2])
        seconds.append(words[2] if len(words) == 3 else "")
    return replace(_links(ends, seconds, path.stem), directed=bool(directed))


def _words(line: str) -> list[str]:
    """The words of a line, split at commas or else at blanks; a quoted name may hold either."""
    if '"' not in line:
        line = line.split("#")[0]
        if "," not in line:
            return line.split()
    delimiter = "," if "," in line else " "
    words = next(csv.reader([line.strip()], delimiter=delimiter, skipinitialspace=True), [])
    return [word.strip() for word in words]


def _links(ends: list[list[str]], seconds: list[str], name: str) -> LinkList:
    """Pairs of names; of numbers where all of them are."""
    numbers = all(word.isdigit() for pair in ends for word in pair)
    links = [(int(a), int(b)) if numbers else (a, b) for a, b in ends]
    timed = [(link, float(s) if s else None) for link, s in zip(links, seconds, strict=True)]
    return LinkList(links=links, link_times=graphs.times_of_all(timed), name=name)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
