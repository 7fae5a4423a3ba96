"""The topology: the workers and the links over which they can talk."""

from __future__ import annotations

import html
import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from matcha._io import write_atomically
from matcha._io.tables import count_noun
from matcha._numerics.spectra import laplacian
from matcha.errors import PlanError, TopologyError
from matcha.topology import drawing, files
from matcha.topology.files import SCHEMA, Weight, are_worker_numbers, pair, plain_label

MAX_SECONDS = 1e9
"""The longest time of a link, thirty years. Beyond it sums overflow."""
Link = tuple[int, int]
Matching = tuple[Link, ...]
Seconds: TypeAlias = Mapping[tuple[Any, Any], float] | Sequence[float]
"""Seconds of each link: by pair, or in the order of the links."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The base communication graph G: m workers joined by links, connected.

    Workers are numbered 0..m-1; `labels[i]` is the user's own name for worker i. The value is
    validated when it is made and never changes. Links carry both ways, unless the topology is
    directed: then (i, j) carries from i to j alone, and every worker must reach every other.

    >>> topology = Topology.from_links([(0, 1), (1, 2), (2, 0)])
    >>> topology.num_workers, topology.links
    (3, ((0, 1), (0, 2), (1, 2)))
    """

    num_workers: int
    links: tuple[Link, ...]
    """Sorted pairs (i, j) with i < j; in a directed topology from i to j, in either order."""
    labels: tuple[Hashable, ...] = ()
    """The user's names of the workers; worker numbers where none were given."""
    link_times: tuple[float, ...] | None = None
    """Seconds that one exchange of the model takes over each link, parallel to `links`."""
    link_latencies: tuple[float, ...] | None = None
    """The part of a link's seconds that a message of any size takes; smaller ones save the rest."""
    positions: tuple[tuple[float, float], ...] | None = field(default=None, repr=False)
    """Where to draw each worker."""
    name: str = "custom"
    directed: bool = False
    """Whether a link carries one way only; a pair with both links may have a time for each."""

    def __post_init__(self) -> None:
        if not self.labels:
            object.__setattr__(self, "labels", tuple(range(self.num_workers)))
        _check_parts(self)
        _check_connected(self)

    # -- making one ---------------------------------------------------------------------------

    @classmethod
    def from_links(
        cls,
        links: Iterable[Sequence[Any]],
        num_workers: int | None = None,
        *,
        labels: Sequence[Hashable] | None = None,
        link_times: Seconds | None = None,
        link_latencies: Seconds | None = None,
        positions: Sequence[Sequence[float]] | None = None,
        name: str = "custom",
        directed: bool = False,
    ) -> Topology:
        """A topology from pairs of workers.

        Integer ends that cover 0..m-1 keep their numbers; any other hashable ends become labels,
        numbered in sorted order (in order of appearance where they do not sort).

        Args:
            links: Pairs of ends, in any order and direction.
            num_workers: How many workers there are, when more than the links mention.
            labels: The workers' names in order; ends are then looked up among them.
            link_times: Seconds for each link: by pair, or in the order of `links`.
            link_latencies: The part of them that a message of any size takes.
            positions: A point (x, y) for each worker.
            name: What to call the topology.
            directed: Whether a pair means a link from its first end to its second alone.

        Raises:
            TopologyError: A self-loop, a duplicate link, fewer than two workers, a graph that is
                not connected, or a link time that is not positive.

        >>> Topology.from_links([("b", "a"), ("b", "c")]).labels
        ('a', 'b', 'c')
        >>> Topology.from_links([(0, 1), (1, 2), (2, 0)], directed=True).links
        ((0, 1), (1, 2), (2, 0))
        """
        pairs = [pair(link) for link in links]
        names = _worker_names(pairs, num_workers, labels)
        number = {label: i for i, label in enumerate(names)}
        for a, b in pairs:
            for end in (a, b):
                if end not in number:
                    raise TopologyError(
                        f"link ({a!r}, {b!r}) names worker {end!r}, "
                        f"but the workers are {_few(names)}."
                    )
        numbered = [(number[a], number[b]) for a, b in pairs]
        if not directed:
            numbered = [(min(link), max(link)) for link in numbered]
        order = sorted(range(len(numbered)), key=numbered.__getitem__)
        return cls(
            num_workers=len(names),
            links=tuple(numbered[e] for e in order),
            labels=tuple(names),
            link_times=_times(link_times, pairs, order, directed=directed),
            link_latencies=_times(link_latencies, pairs, order, directed=directed),
            positions=None
            if positions is None
            else tuple((float(x), float(y)) for x, y in positions),
            name=name,
            directed=directed,
        )

    @classmethod
    def from_networkx(
        cls, graph: Any, *, name: str | None = None, weight: Weight | None = None
    ) -> Topology:
        """A topology from a networkx graph, directed or not; labels may be anything hashable.

        Edge attribute `time` (seconds) becomes the link time, and node attribute `pos` the
        position.

        Args:
            graph: A networkx graph.
            name: What to call the topology; by default the graph's own name.
            weight: What edge attribute `weight` means: `"time"`, the seconds of one exchange, or
                `"ignore"`. Without it, weights that differ are refused.

        Raises:
            TopologyError: The graph is a multigraph, or not a valid topology.
        """
        return cls.from_links(**files.from_networkx(graph, name, weight))

    @classmethod
    def read(cls, path: str | Path, *, weight: Weight | None = None) -> Topology:
        """A topology from a file: JSON, GraphML, CSV, an edge list, or an npy adjacency matrix.

        Args:
            path: The file; its ending says which format it is in.
            weight: What a link's `weight` means, as in `from_networkx`.

        Raises:
            TopologyError: The file is missing, unreadable, or does not hold a valid topology.
        """
        with files.explain(Path(path)):
            return cls.from_links(**files.read(Path(path), weight))

    @classmethod
    def from_json(cls, document: Any) -> Topology:
        """The topology in a JSON document: ours, node-link data, or a plain list of links."""
        return cls.from_links(**files.from_json(document))

    def to_json(self) -> dict[str, Any]:
        """The topology as plain JSON values."""
        numbered = self.labels == tuple(range(self.num_workers))
        optional = {
            "directed": self.directed or None,
            "labels": None if numbered else [plain_label(label) for label in self.labels],
            "link_times": self.link_times and list(self.link_times),
            "link_latencies": self.link_latencies and list(self.link_latencies),
            "positions": self.positions and [list(point) for point in self.positions],
        }
        return {
            "schema": SCHEMA,
            "name": self.name,
            "num_workers": self.num_workers,
            "links": [list(link) for link in self.links],
            **{key: value for key, value in optional.items() if value is not None},
        }

    def save(self, path: str | Path) -> None:
        """Write the topology as JSON that `Topology.read` takes back unchanged."""
        write_atomically(Path(path), json.dumps(self.to_json(), indent=1) + "\n")

    def with_link_times(
        self,
        link_times: Seconds,
        latencies: Seconds | None = None,
    ) -> Topology:
        """The same topology with seconds for each link, by pair of labels or in link order.

        Args:
            link_times: Of an exchange of whole models.
            latencies: the part that a message of any size takes; None: unknown.
        """
        pairs = [(self.labels[i], self.labels[j]) for i, j in self.links]
        times, waits = (
            _times(values, pairs, range(len(pairs)), directed=self.directed)
            for values in (link_times, latencies)
        )
        return replace(self, link_times=times, link_latencies=waits)

    # -- reading it ---------------------------------------------------------------------------

    @cached_property
    def link_array(self) -> npt.NDArray[np.int64]:
        """The links as a read-only array of shape (number of links, 2)."""
        array = np.array(self.links, dtype=np.int64).reshape(-1, 2)
        array.setflags(write=False)
        return array

    @cached_property
    def columns(self) -> dict[Link, int]:
        """The position of each link; where it carries both ways, of messages either way."""
        column = {link: e for e, link in enumerate(self.links)}
        return column if self.directed else column | {(j, i): e for (i, j), e in column.items()}

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """How many links each worker has; in a directed topology, those out of it or into it."""
        m, links = self.num_workers, self.link_array
        if self.directed:
            out, into = (np.bincount(links[:, end], minlength=m) for end in (0, 1))
            return tuple(int(d) for d in np.maximum(out, into))
        return tuple(int(d) for d in np.bincount(links.ravel(), minlength=m))

    @property
    def max_degree(self) -> int:
        """Δ, the degree of the busiest worker."""
        return max(self.degrees)

    @cached_property
    def arrows(self) -> tuple[Link, ...]:
        """Every way that a message can go, from sender to receiver, sorted."""
        if self.directed:
            return self.links
        return tuple(sorted([*self.links, *((j, i) for i, j in self.links)]))

    @cached_property
    def _neighbors(self) -> tuple[tuple[int, ...], ...]:
        around: list[list[int]] = [[] for _ in range(self.num_workers)]
        for i, j in self.links:
            around[i].append(j)
            around[j].append(i)
        return tuple(tuple(sorted(set(a))) for a in around)

    def neighbors(self, worker: int) -> tuple[int, ...]:
        """The workers that share a link with `worker`."""
        return self._neighbors[worker]

    def laplacian(self) -> Any:
        """The graph Laplacian L = D − A as a sparse CSR matrix."""
        return laplacian(self.link_array, self.num_workers)

    def to_networkx(self) -> Any:
        """The topology as a networkx graph over the user's own labels."""
        import networkx as nx

        graph = nx.DiGraph(name=self.name) if self.directed else nx.Graph(name=self.name)
        for i, label in enumerate(self.labels):
            graph.add_node(label, **({} if self.positions is None else {"pos": self.positions[i]}))
        for e, (i, j) in enumerate(self.links):
            time = {} if self.link_times is None else {"time": self.link_times[e]}
            graph.add_edge(self.labels[i], self.labels[j], **time)
        return graph

    # -- looking at it ------------------------------------------------------------------------

    @cached_property
    def layout(self) -> npt.NDArray[np.float64]:
        """A point for each worker: `positions`, or one that shows the structure of the links."""
        if self.positions is not None:
            return np.array(self.positions, dtype=np.float64)
        return drawing.layout(self.num_workers, self.links)

    def plot(self, ax: Any = None) -> Any:
        """Draw workers and links on matplotlib's axes, or on those of a new figure; returns them.

        Raises:
            PackageError: matplotlib is not installed.
        """
        ax = drawing.axes_or_new(ax)
        drawing.draw(ax, self.layout, self.links, self.labels, directed=self.directed)
        ax.set_title(str(self), fontsize=11)
        return ax

    def picture(self, **parts: Any) -> str:
        """The network as SVG, for notebooks; empty where it is too large to be looked at."""
        if self.num_workers > drawing.MOST_DRAWN:
            return ""
        look = {"directed": self.directed, "text": str(self), **parts}
        return drawing.picture(self.layout, self.links, self.labels, **look)

    def _repr_html_(self) -> str:
        return f"{self.picture()}<p>{html.escape(str(self))}</p>"

    def __str__(self) -> str:
        links = count_noun(len(self.links), "one-way link" if self.directed else "link")
        return f"{self.name}: {self.num_workers} workers, {links}"


def check_matchings(
    topology: Topology, matchings: tuple[Matching, ...], *, push: bool = False
) -> None:
    """Refuse matchings that use links the topology lacks, or a worker twice.

    With `push` the pairs are messages (sender, receiver); each worker sends at most one and
    receives at most one.
    """
    links = set(topology.arrows if push else topology.links)
    for number, matching in enumerate(matchings):
        busy: set[tuple[int, str]] = set()
        for i, j in matching:
            if (i, j) not in links:
                raise PlanError(
                    f"matching {number} uses link ({i}, {j}), which is not a link of the topology."
                )
            for end in (i, "sender"), (j, "receiver" if push else "sender"):
                if end in busy:
                    way = f" as {end[1]}" if push else ""
                    raise PlanError(
                        f"matching {number} uses worker {end[0]} twice{way}: "
                        "links of a matching share no worker."
                    )
                busy.add(end)


# -- validation ---------------------------------------------------------------------------------


def _worker_names(
    pairs: Sequence[tuple[Any, Any]], num_workers: int | None, labels: Sequence[Hashable] | None
) -> list[Hashable]:
    if labels is not None:
        names = list(labels)
        if len(set(names)) != len(names):
            twice = next(n for k, n in enumerate(names) if n in names[:k])
            raise TopologyError(f"the label {twice!r} names two workers: labels must differ.")
        return names
    seen = list(dict.fromkeys(end for pair in pairs for end in pair))
    integers = all(isinstance(n, (int, np.integer)) and not isinstance(n, bool) for n in seen)
    if num_workers is not None:
        if not integers or any(not 0 <= n < num_workers for n in seen):
            raise TopologyError(
                f"with num_workers={num_workers} the ends of links are numbers "
                f"0..{num_workers - 1}, but they are {_few(seen)}."
            )
        return list(range(num_workers))
    if are_worker_numbers(seen):
        return list(range(len(seen)))
    try:
        return sorted(seen)
    except TypeError:
        return seen


def _times(
    times: Seconds | None,
    pairs: Sequence[tuple[Any, Any]],
    order: Iterable[int],
    *,
    directed: bool,
) -> tuple[float, ...] | None:
    if times is None:
        return None
    if isinstance(times, Mapping):
        values = []
        for a, b in pairs:
            if (a, b) not in times and (directed or (b, a) not in times):
                raise TopologyError(f"no time is given for link ({a!r}, {b!r}).")
            values.append(times[(a, b)] if (a, b) in times else times[(b, a)])
    else:
        values = list(times)
        if len(values) != len(pairs):
            raise TopologyError(f"{len(values)} link times were given for {len(pairs)} links.")
    return tuple(float(values[e]) for e in order)


def _check_parts(topology: Topology) -> None:
    m, links, labels = topology.num_workers, topology.links, topology.labels
    if len(labels) != m:
        raise TopologyError(f"{len(labels)} labels were given for {m} workers.")
    if topology.positions is not None and len(topology.positions) != m:
        raise TopologyError(f"{len(topology.positions)} positions were given for {m} workers.")
    seen: set[Link] = set()
    for i, j in links:
        if not (0 <= i < m and 0 <= j < m) or (j < i and not topology.directed):
            kind = "pair" if topology.directed else "pair i < j"
            raise TopologyError(f"link ({i}, {j}) is not a {kind} of workers 0..{m - 1}.")
        if i == j:
            raise TopologyError(f"worker {labels[i]!r} has a link to itself: remove the self-loop.")
        if (i, j) in seen:
            raise TopologyError(f"link ({labels[i]!r}, {labels[j]!r}) is given twice: keep one.")
        seen.add((i, j))
    if m < 2:
        raise TopologyError(f"a topology needs at least 2 workers, but this one has {m}.")
    if list(links) != sorted(links):
        raise TopologyError("links are not sorted: use Topology.from_links.")
    times, waits = topology.link_times, topology.link_latencies
    if times is None:
        if waits is not None:
            raise TopologyError("it has link latencies, but no link times.")
        return
    if len(times) != len(links):
        raise TopologyError(f"{len(times)} link times were given for {len(links)} links.")
    for (i, j), seconds in zip(links, times, strict=True):
        if not 0 < seconds <= MAX_SECONDS:
            raise TopologyError(
                f"link ({labels[i]!r}, {labels[j]!r}) has time {seconds!r}: link times are "
                f"positive seconds, at most {MAX_SECONDS:g}."
            )
    if waits is not None and not (
        len(waits) == len(times) and all(0 <= w <= t for w, t in zip(waits, times, strict=False))
    ):
        raise TopologyError("link latencies need one value per link, a part of the link's time.")


def joins_all(ends: npt.ArrayLike, num_workers: int, *, strong: bool = False) -> bool:
    """Whether links, as rows (i, j), lead from every worker to every other; `strong`: one way."""
    return not parts_of(ends, num_workers, strong=strong).any()


def parts_of(ends: npt.ArrayLike, num_workers: int, *, strong: bool = False) -> Any:
    """Which of the parts that links join each worker is in, numbered from 0."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    i, j = np.asarray(ends, dtype=np.int64).reshape(-1, 2).T
    graph = coo_array((np.ones(len(i)), (i, j)), shape=(num_workers, num_workers))
    return connected_components(graph, directed=strong, connection="strong")[1]


def _check_connected(topology: Topology) -> None:
    # All workers reach one another where worker 0 reaches all, and all reach worker 0.
    for way in (1, -1) if topology.directed else (1,):
        unreached = _unreached((arrow[::way] for arrow in topology.arrows), topology.num_workers)
        if not unreached:
            continue
        a, b = (topology.labels[0], topology.labels[min(unreached)])[::way]
        if topology.directed:
            raise TopologyError(
                f"the graph is not strongly connected: no path leads from worker {a!r} to worker "
                f"{b!r}; add a link that way, or leave directed out if links carry both ways."
            )
        raise TopologyError(
            f"the graph is not connected: no path joins worker {a!r} and worker {b!r}; add a link "
            "between their parts."
        )


def _unreached(arrows: Iterable[Sequence[int]], num_workers: int) -> set[int]:
    """The workers that no path from worker 0 reaches."""
    after: list[list[int]] = [[] for _ in range(num_workers)]
    for i, j in arrows:
        after[i].append(j)
    unreached, stack = set(range(1, num_workers)), [0]
    while stack:
        for j in after[stack.pop()]:
            if j in unreached:
                unreached.discard(j)
                stack.append(j)
    return unreached


def _few(names: Sequence[Hashable]) -> str:
    shown = ", ".join(repr(n) for n in names[:6])
    return shown + (", …" if len(names) > 6 else "")
