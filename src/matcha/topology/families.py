"""Families of topologies, and the five graphs of the paper."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from importlib import resources
from itertools import repeat
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from matcha.errors import InputError, TopologyError, unknown_name
from matcha.topology.topology import Matching, Topology, joins_all

MAX_LINKS = 2_000_000
"""The largest graph that is made by name: its links alone take about a gigabyte."""
_MAX_DRAWS = 1000


def ring(num_workers: int) -> Topology:
    """Each worker talks to the one before and the one after it.

    >>> ring(4).links
    ((0, 1), (0, 3), (1, 2), (2, 3))
    """
    name = _name("ring", num_workers, 3, num_workers)
    links = [(i, (i + 1) % num_workers) for i in range(num_workers)]
    return Topology.from_links(links, positions=_circle(num_workers), name=name)


def path(num_workers: int) -> Topology:
    """A line of workers.

    >>> path(3).links
    ((0, 1), (1, 2))
    """
    name = _name("path", num_workers, 2, num_workers)
    links = [(i, i + 1) for i in range(num_workers - 1)]
    points = [(float(i), 0.0) for i in range(num_workers)]
    return Topology.from_links(links, positions=points, name=name)


def torus(rows: int, columns: int) -> Topology:
    """A grid whose edges wrap around.

    >>> torus(3, 3).max_degree
    4
    """
    _name("torus", min(rows, columns), 2, 0)
    name = _check_size(f"torus:{rows}x{columns}", 2 * rows * columns)
    cells = [(r, c) for r in range(rows) for c in range(columns)]
    links = set()
    for r, c in cells:
        here = r * columns + c
        for there in (r * columns + (c + 1) % columns, (r + 1) % rows * columns + c):
            links.add((min(here, there), max(here, there)))
    points = [(float(c), float(-r)) for r, c in cells]
    return Topology.from_links(sorted(links), positions=points, name=name)


def hypercube(dimension: int) -> Topology:
    """2^d workers; links join numbers that differ in one bit.

    >>> hypercube(3).num_workers, hypercube(3).max_degree
    (8, 3)
    """
    name = _name("hypercube", dimension, 1, dimension * 2 ** min(dimension - 1, 64))
    m = 2**dimension
    links = [(i, i ^ 1 << b) for i in range(m) for b in range(dimension) if i < i ^ 1 << b]
    return Topology.from_links(links, name=name)


def star(num_workers: int) -> Topology:
    """Worker 0 talks to all others, which do not talk to one another.

    >>> star(4).degrees
    (3, 1, 1, 1)
    """
    name = _name("star", num_workers, 2, num_workers)
    points = [(0.0, 0.0), *_circle(num_workers - 1)]
    links = [(0, i) for i in range(1, num_workers)]
    return Topology.from_links(links, positions=points, name=name)


def complete(num_workers: int) -> Topology:
    """Every worker can talk to every other.

    >>> len(complete(5).links)
    10
    """
    name = _name("complete", num_workers, 2, num_workers * (num_workers - 1) // 2)
    links = [(i, j) for i in range(num_workers) for j in range(i + 1, num_workers)]
    return Topology.from_links(links, positions=_circle(num_workers), name=name)


def barbell(num_workers: int) -> Topology:
    """Two complete halves joined by one link: the worst cut a network can have.

    >>> barbell(6).degrees
    (2, 2, 3, 3, 2, 2)
    """
    name = _name("barbell", num_workers, 4, num_workers * (num_workers - 2) // 4)
    half = num_workers // 2
    left = [(i, j) for i in range(half) for j in range(i + 1, half)]
    right = [(i, j) for i in range(half, num_workers) for j in range(i + 1, num_workers)]
    links = [*left, *right, (half - 1, half)]
    return Topology.from_links(links, name=name)


def erdos_renyi(num_workers: int, probability: float, seed: int = 0) -> Topology:
    """Each pair is linked with `probability`; redrawn until connected, the seed decides all.

    >>> erdos_renyi(16, 0.3, seed=1) == erdos_renyi(16, 0.3, seed=1)
    True
    """
    _name("erdos-renyi", num_workers, 2, 0)
    if not 0 < probability <= 1:
        raise InputError(f"erdos-renyi needs a probability in (0, 1], not {probability!r}.")
    name = f"erdos-renyi:{num_workers}:{probability:g}:{seed}"
    # Drawing looks at every pair: beyond 100,000 workers that is minutes, whatever the links.
    pairs = num_workers * (num_workers - 1) / 2
    _check_size(name, max(probability * pairs, pairs / 2500))

    links: list[tuple[int, int]] = []
    for rng in _attempts(num_workers, seed, name):
        links = [
            (i, i + 1 + j)
            for i in range(num_workers - 1)
            for j in np.flatnonzero(rng.random(num_workers - 1 - i) < probability).tolist()
        ]
        if joins_all(links, num_workers):
            break
    return Topology.from_links(links, num_workers, name=name)


def geometric(num_workers: int, radius: float, seed: int = 0) -> Topology:
    """Workers at random points of the unit square, linked when closer than `radius`.

    Redrawn until connected; the seed decides all.

    >>> geometric(16, radius=0.4, seed=1).num_workers
    16
    """
    _name("geometric", num_workers, 2, 0)
    if not radius > 0:
        raise InputError(f"geometric needs a positive radius, not {radius!r}.")
    name = f"geometric:{num_workers}:{radius:g}:{seed}"
    share = min(1.0, 3.2 * min(radius, 1.0) ** 2)  # of all pairs, at most
    _check_size(name, max(num_workers, share * num_workers * (num_workers - 1) / 2))

    from scipy.spatial import cKDTree

    links, points = [], np.empty((num_workers, 2))
    for rng in _attempts(num_workers, seed, name):
        points = rng.random((num_workers, 2))
        links = cKDTree(points).query_pairs(radius, output_type="ndarray").tolist()
        if joins_all(links, num_workers):
            break
    return Topology.from_links(links, num_workers, positions=points.tolist(), name=name)


def one_way(topology: Topology, share: float, seed: int = 0) -> Topology:
    """The topology with a share of its links carrying one way only, still strongly connected.

    >>> one_way(ring(4), 1.0).links
    ((0, 3), (1, 0), (2, 1), (3, 2))

    Raises:
        TopologyError: The share is not a fraction, or that many links cannot lose a direction.
    """
    if not 0 <= share <= 1 or topology.directed:
        raise TopologyError(
            f"a share of {share!r} of the links cannot carry one way: choose 0 to 1, of a topology "
            "whose links carry both."
        )
    rng = np.random.default_rng(seed)
    arrows, wanted = set(topology.arrows), round(share * len(topology.links))
    for i, j in rng.permutation(topology.links).tolist():
        for lost in ((i, j), (j, i)) if rng.random() < 0.5 else ((j, i), (i, j)):
            if wanted and joins_all(sorted(arrows - {lost}), topology.num_workers, strong=True):
                arrows.discard(lost)
                wanted -= 1
                break
    if wanted:
        raise TopologyError(f"{wanted} more links cannot lose a way: a worker would be cut off.")
    times = None
    if topology.link_times is not None:
        both = dict(zip(topology.links, topology.link_times, strict=True))
        times = {(i, j): both[min(i, j), max(i, j)] for i, j in arrows}
    return Topology.from_links(
        sorted(arrows),
        topology.num_workers,
        link_times=times,
        positions=topology.positions,
        name=f"{topology.name}, {share:.0%} one way",
        directed=True,
    )


def paper(name: str) -> Topology:
    """One of the paper's graphs: er8, geometric16-d5, geometric16-d10, geometric16-d13, er16.

    >>> paper("er8").num_workers, paper("er8").max_degree
    (8, 5)
    """
    graph = _paper_graph(name)
    return Topology.from_links(graph["edges"], graph["num_workers"], name=f"paper:{name}")


def paper_matchings(name: str) -> tuple[Matching, ...]:
    """The authors' own decomposition of one of the paper's graphs."""
    return tuple(
        tuple(sorted((min(i, j), max(i, j)) for i, j in matching))
        for matching in _paper_graph(name)["matchings"]
    )


def parse(text: str) -> Topology:
    """The topology that a command line names: a family with its numbers, or a file.

    >>> parse("torus:4x4").num_workers
    16

    Raises:
        InputError: The family is unknown or its numbers are wrong.
    """
    family, _, rest = text.partition(":")
    if family not in _FAMILIES:
        if Path(text).exists() or Path(text).suffix or "/" in text:
            return Topology.read(text)
        raise unknown_name("topology family", family, _FAMILIES)
    build, usage = _FAMILIES[family]
    separator = "x" if "x" in usage else ":"
    kinds, words = usage.split(separator), rest.split(separator)
    try:
        if len(words) not in (len(kinds), len(kinds) - kinds.count("SEED")) or not rest:
            raise ValueError
        values = [_KINDS.get(kind, int)(word) for kind, word in zip(kinds, words, strict=False)]
    except ValueError:
        raise InputError(f"{text!r} is not of the form {family}:{usage}.") from None
    return build(*values)


TopologyLike: TypeAlias = Topology | str | PathLike[str] | Iterable[Any]
"""What is taken wherever a topology is: one, its name, a file, a networkx graph, or its links."""


def as_topology(given: TopologyLike) -> Topology:
    """The topology that a value stands for.

    >>> as_topology("ring:4").num_workers, as_topology([(0, 1), (1, 2)]).links
    (4, ((0, 1), (1, 2)))

    Raises:
        InputError: It is none of `TopologyLike`, or not a valid topology.
    """
    if isinstance(given, Topology):
        return given
    if isinstance(given, str | PathLike):
        return parse(str(given))
    if hasattr(given, "is_multigraph"):
        return Topology.from_networkx(given)
    if isinstance(given, Mapping) or not isinstance(given, Iterable):
        raise InputError(
            f"the topology is {given!r:.60}, but it is a Topology, a name such as 'ring:8', a "
            "file, a networkx graph, or a list of links."
        )
    pairs = (link.tolist() if isinstance(link, np.ndarray) else link for link in given)
    return Topology.from_json(list(pairs))


# -- helpers ------------------------------------------------------------------------------------


def _check_size(name: str, num_links: float) -> str:
    """Refuse a graph before its links fill the memory; its name."""
    if num_links > MAX_LINKS:
        raise InputError(
            f"{name} would have about {num_links:.2g} links, more than the {MAX_LINKS:,} that "
            "can be planned: choose fewer workers or a sparser family."
        )
    return name


def _name(family: str, size: int, least: int, num_links: float) -> str:
    """The name of a graph, of which there is one of each size."""
    if size < least:
        raise TopologyError(f"{family} needs a size of at least {least}, not {size}.")
    return _check_size(f"{family}:{size}", num_links)


def _circle(n: int) -> list[tuple[float, float]]:
    angles = [math.tau * i / n + math.pi / 2 for i in range(n)]
    return [(math.cos(a), math.sin(a)) for a in angles]


def _attempts(num_workers: int, seed: int, name: str) -> Iterator[np.random.Generator]:
    """What to draw from, as often as a graph may come out with parts that nothing joins."""
    if seed < 0:
        raise InputError(f"{name}: the seed is {seed}, but it is a whole number from 0 up.")
    yield from repeat(np.random.default_rng(seed), _MAX_DRAWS if num_workers <= 1000 else 30)
    raise TopologyError(f"{name}: no connected graph turned up; raise the density.")


@lru_cache(maxsize=8)
def _paper_graph(name: str) -> dict[str, Any]:
    file = resources.files("matcha.topology").joinpath("paper_graphs.json")
    graphs = {graph["name"]: graph for graph in json.loads(file.read_text(encoding="utf-8"))}
    if name not in graphs:
        raise unknown_name("paper graph", name, graphs)
    found: dict[str, Any] = graphs[name]
    return found


_FAMILIES: dict[str, tuple[Callable[..., Topology], str]] = {
    "ring": (ring, "WORKERS"),
    "path": (path, "WORKERS"),
    "torus": (torus, "ROWSxCOLUMNS"),
    "hypercube": (hypercube, "DIMENSION"),
    "star": (star, "WORKERS"),
    "complete": (complete, "WORKERS"),
    "barbell": (barbell, "WORKERS"),
    "erdos-renyi": (erdos_renyi, "WORKERS:PROBABILITY:SEED"),
    "geometric": (geometric, "WORKERS:RADIUS:SEED"),
    "paper": (paper, "NAME"),
}
_KINDS: dict[str, Callable[[str], Any]] = {"PROBABILITY": float, "RADIUS": float, "NAME": str}
"""Of the words of a name; others are whole numbers."""
