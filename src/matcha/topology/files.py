"""Links as users have them: networkx graphs, and JSON, GraphML, tables and arrays in files.

Each reader returns the arguments of `Topology.from_links`, which checks and numbers the workers.
"""

from __future__ import annotations

import csv
import json
import tokenize
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from matcha._io import MAX_BYTES
from matcha.errors import TopologyError

SCHEMA = "matcha.topology/1"
Links: TypeAlias = dict[str, Any]
"""The arguments of `Topology.from_links`."""
Weight: TypeAlias = Literal["time", "ignore"]
"""What the weight of a link means: the seconds of one exchange, or nothing."""
_WEIGHTS = (
    "its links carry 'weight', which may mean anything: rename it 'time' if it is the seconds of "
    "one exchange, otherwise remove it; in Python, weight='time' or weight='ignore' says so, too."
)

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


def read(path: Path, weight: Weight | None = None) -> Links:
    """The links in a file; its ending says which format it is in.

    `.json` (ours, networkx's node-link data, or a plain list of links), `.graphml`, `.csv` (an
    adjacency matrix or a list of links), `.npy` (adjacency matrix), `.edges`, `.edgelist` and
    `.txt` (a link per line: two ends and, if all have it, seconds; `a -> b` on every line where
    links carry one way).
    """
    readers: dict[str, Callable[[Path, Weight | None], Links]] = {
        ".json": _read_json,
        ".graphml": _read_graphml,
        ".xml": _read_graphml,
        ".csv": _read_csv,
        ".npy": lambda file, _: from_adjacency(np.load(file, allow_pickle=False), file.stem),
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
    """Say in one sentence, with the file's name, what is wrong with what was read from it."""
    try:
        yield
    except TopologyError as error:
        named = repr(str(path)) in str(error)
        raise TopologyError(str(error) if named else f"{str(path)!r}: {error}") from None
    except _UNREADABLE as error:
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise TopologyError(
            f"{str(path)!r} could not be read as {path.suffix[1:].lower()}: {reason}"
        ) from None


def _read_json(path: Path, weight: Weight | None) -> Links:
    return {"name": path.stem} | from_json(json.loads(path.read_text(encoding=_TEXT)), weight)


def _read_graphml(path: Path, weight: Weight | None) -> Links:
    import networkx as nx

    try:
        graph = nx.read_graphml(path)
    except nx.NetworkXError as error:
        raise ValueError(error) from None
    if all(str(node).lstrip("n").isdigit() for node in graph.nodes):
        numbers = {node: int(str(node).lstrip("n")) for node in graph.nodes}
        if set(numbers.values()) == set(range(len(numbers))):
            graph = nx.relabel_nodes(graph, numbers)
    return from_networkx(graph, path.stem, weight)


# -- tables ---------------------------------------------------------------------------------------


def _read_csv(path: Path, weight: Weight | None) -> Links:
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


def _as_matrix(rows: list[list[str]], name: str) -> Links | None:
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
    found = from_adjacency(matrix, name)
    if labels is None or set(labels) == {str(i) for i in range(len(labels))}:
        return found
    named = [(labels[i], labels[j]) for i, j in found["links"]]
    return {**found, "links": named, "labels": labels, "num_workers": None}


def _as_links(rows: list[list[str]], name: str, weight: Weight | None) -> Links:
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
            raise TopologyError(_WEIGHTS)
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


def _read_edges(path: Path, weight: Weight | None) -> Links:
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
    return {**_links(ends, seconds, path.stem), "directed": bool(directed)}


def _words(line: str) -> list[str]:
    """The words of a line, split at commas or else at blanks; a quoted name may hold either."""
    if '"' not in line:
        line = line.split("#")[0]
        if "," not in line:
            return line.split()
    delimiter = "," if "," in line else " "
    words = next(csv.reader([line.strip()], delimiter=delimiter, skipinitialspace=True), [])
    return [word.strip() for word in words]


def _links(ends: list[list[str]], seconds: list[str], name: str) -> Links:
    """Pairs of names; of numbers where all of them are."""
    numbers = all(word.isdigit() for pair in ends for word in pair)
    links = [(int(a), int(b)) if numbers else (a, b) for a, b in ends]
    timed = [(link, float(s) if s else None) for link, s in zip(links, seconds, strict=True)]
    return {"links": links, "link_times": times_of_all(timed), "name": name}


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


# -- graphs and documents -------------------------------------------------------------------------


def from_networkx(graph: Any, name: str | None = None, weight: Weight | None = None) -> Links:
    """The links of a networkx graph, with edges' `time` and, where all have it, nodes' `pos`."""
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
        raise TopologyError(_WEIGHTS)  # seconds, a bandwidth or a likeness: its author knows
    nodes = list(graph.nodes)
    nodes = list(range(len(nodes))) if are_worker_numbers(nodes) else nodes
    points = [graph.nodes[node].get("pos") for node in nodes]
    return {
        "links": [(a, b) for a, b, _ in edges],
        "labels": nodes,
        "link_times": times_of_all([((a, b), data.get(key)) for a, b, data in edges]),
        "positions": None if any(p is None for p in points) else points,
        "name": name or str(graph.name or "networkx"),
        "directed": graph.is_directed(),
    }


def times_of_all(timed: Sequence[tuple[tuple[Any, Any], float | None]]) -> list[float] | None:
    """Seconds for each link, None where no link has them; refused where only some have.

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


def from_adjacency(matrix: npt.NDArray[Any], name: str) -> Links:
    """A link wherever the entry of an adjacency matrix is not zero.

    Entries of 0 and 1 say only who is linked; any others are the links' seconds. Where the matrix
    is not symmetric the topology is directed: row i, column j is the link from i to j.
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
    return {
        "links": links,
        "num_workers": matrix.shape[0],
        "link_times": None if set(seconds) <= {1.0} else seconds,
        "name": name,
        "directed": directed,
    }


def from_json(document: Any, weight: Weight | None = None) -> Links:
    """The links in a JSON document: ours, networkx's node-link data, or a plain list of links.

    A link of the list is a pair of workers, or a pair and its seconds.
    """
    if isinstance(document, list):
        timed = [_timed_link(entry) for entry in document]
        return {"links": [link for link, _ in timed], "link_times": times_of_all(timed)}
    if not isinstance(document, dict) or not {"links", "edges"} & document.keys():
        raise TopologyError('it is neither a list of links nor an object with "links".')
    if "nodes" in document:
        return _from_node_link(document, weight)
    if "links" not in document:
        raise TopologyError('it has "edges" but no "nodes": node-link data has both.')
    schema = document.get("schema", SCHEMA)
    if schema != SCHEMA:
        raise TopologyError(f"its schema is {schema!r}, but {SCHEMA!r} is wanted.")
    given = {key: document[key] for key in _MEMBERS if document.get(key) is not None}
    for key, value in given.items():
        kind, fits = _MEMBERS[key]
        if not fits(value):
            raise TopologyError(f"its {key!r} is {value!r:.60}, but it is {kind}.")
    links = given["links"] = [pair(entry) for entry in given.get("links", ())]
    if "labels" in given:
        labels = given["labels"] = [_hashable(name) for name in given["labels"]]
        given["links"] = [(_label_at(labels, i), _label_at(labels, j)) for i, j in links]
    # Before a list of all workers is made: a file may name billions.
    num_workers = given.get("num_workers", 0)
    if num_workers > len(links) + 1:
        raise TopologyError(
            f"{num_workers:,} workers need at least {num_workers - 1:,} links to be connected, but "
            f"there are {len(links):,}: add links, or leave num_workers out."
        )
    return {"name": "custom"} | given


def are_worker_numbers(names: Sequence[Hashable]) -> bool:
    """Whether names are 0, …, m − 1 already, in any order."""
    return all(isinstance(n, (int, np.integer)) and not isinstance(n, bool) for n in names) and set(
        names
    ) == set(range(len(names)))


def _label_at(labels: Sequence[Hashable], number: Any) -> Hashable:
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(labels):
        raise TopologyError(f"a link names worker {number!r}, but there are {len(labels)} labels.")
    return labels[number]


def _is_list(value: Any, fits: Callable[[Any], bool] = lambda item: True) -> bool:
    return isinstance(value, list) and all(map(fits, value))


def _is_real(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_name(value: Any) -> bool:
    return isinstance(value, (str, int, float)) or _is_list(value, _is_name)


_MEMBERS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "links": ("a list of links", _is_list),
    "num_workers": ("a whole number from 2 up", lambda n: type(n) is int and n >= 2),
    "labels": ("a list of names", lambda value: _is_list(value, _is_name)),
    "link_times": ("a list of numbers", lambda value: _is_list(value, _is_real)),
    "link_latencies": ("a list of numbers", lambda value: _is_list(value, _is_real)),
    "positions": (
        "a list of pairs [x, y]",
        lambda value: _is_list(value, lambda point: _is_list(point, _is_real) and len(point) == 2),
    ),
    "name": ("a text", lambda value: isinstance(value, str)),
    "directed": ("true or false", lambda value: isinstance(value, bool)),
}
"""What a document of ours may hold: the arguments of `Topology.from_links`."""


def _from_node_link(document: dict[str, Any], weight: Weight | None) -> Links:
    """What `networkx.node_link_data` wrote, with its links under "edges" or "links"."""
    import networkx as nx

    edges = "edges" if "edges" in document else "links"
    try:
        # Files written by hand leave these out and mean neither; networkx would assume both.
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
        return pair(entry), None
    seconds = entry[2]
    if not _is_real(seconds):
        raise TopologyError(f"link {entry!r} ends in its seconds, but {seconds!r} is not a number.")
    return pair(entry[:2]), float(seconds)


def pair(link: Any) -> tuple[Any, Any]:
    """The two ends of a link, each of which is a name."""
    if isinstance(link, (str, Mapping)) or not hasattr(link, "__getitem__") or len(link) != 2:
        raise TopologyError(f"a link is a pair of workers, but {link!r} is not.")
    ends = (link[0], link[1])
    for end in ends:
        if end is None or isinstance(end, bool) or not isinstance(end, Hashable):
            raise TopologyError(f"link {ends!r} names a worker {end!r}, which is not a name.")
    return ends


def plain_label(label: Any) -> Any:
    """A worker's name as JSON can hold it."""
    if isinstance(label, (str, int, float, bool)) or label is None:
        return label
    if isinstance(label, tuple):
        return [plain_label(part) for part in label]
    return str(label)
