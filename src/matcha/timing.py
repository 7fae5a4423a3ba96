"""Delay models: what the matchings of a round cost.

Matchings of a round are exchanged one after another; the links of a matching all at once.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from matcha._io import Registry
from matcha.errors import InputError, TopologyError
from matcha.topology import Link, Matching, Topology


class Timing(ABC):
    """A delay model: the time of one matching, and of a round of several.

    For one of your own, say what a matching takes, in which `unit`, and how it is saved. The rest
    follows where times add up: the constraint is Σ p_j c_j <= C_b Σ c_j.
    """

    @property
    def is_gathered(self) -> bool:
        """Whether workers average by sending all others their messages, not by an all-reduce."""
        return False

    @property
    def unit(self) -> str:
        """`"units"` or `"seconds"`."""
        return "units"

    @abstractmethod
    def matching_time(self, matching: Matching) -> float:
        """The time of one matching alone."""

    def to_json(self) -> dict[str, Any]:
        """The model as plain JSON values; plans with a model that has none cannot be saved."""
        return {}

    def round_time(self, matchings: Sequence[Matching]) -> float:
        """The time of matchings exchanged one after another."""
        return float(sum(self.matching_time(matching) for matching in matchings))

    def expected_time(self, matchings: Sequence[Matching], probabilities: Sequence[float]) -> float:
        """The expected time of a round in which each matching is active independently."""
        times = (self.matching_time(matching) for matching in matchings)
        return float(sum(p * t for p, t in zip(probabilities, times, strict=True)))

    def costs(self, matchings: Sequence[Matching]) -> tuple[float, ...]:
        """What each matching weighs in the budget constraint Σ p_j · cost_j <= allowance."""
        return tuple(self.matching_time(matching) for matching in matchings)

    def allowance(self, matchings: Sequence[Matching], budget: float) -> float:
        """The largest Σ p_j · cost_j within the budget."""
        return budget * sum(self.costs(matchings))


_SEARCHED_UP_TO, _RING_STEPS = 64, 20_000  # workers, and steps of the search for their best ring


@dataclass(frozen=True, slots=True)
class Units(Timing):
    """Every matching costs one unit of time (the paper's t(Δ) = Δ).

    >>> Units().round_time([((0, 1),), ((1, 2),)])
    2.0
    """

    unit = "units"

    def matching_time(self, matching: Matching) -> float:
        return 1.0 if matching else 0.0

    def to_json(self) -> dict[str, Any]:
        return {"model": "units"}


@dataclass(frozen=True)
class Scaled(Timing):
    """A round of n matchings costs t(n), for any increasing t (section 3, "Extension").

    The budget constraint becomes t(Σ p_j) <= C_b · t(M). Only the values t(0), t(1), … matter to
    a plan that has been made; they are what is saved.

    >>> Scaled(lambda n: n**0.5, 4).round_time([((0, 1),)] * 4)
    2.0
    """

    t: Callable[[float], float] = field(compare=False, repr=False)
    num_matchings: int
    unit = "units"
    table: tuple[float, ...] = field(init=False, repr=False)
    """The values t(0), t(1), …, t(M); an empty round costs nothing. They tell models apart."""

    def __post_init__(self) -> None:
        table = (0.0, *(float(self.t(n)) for n in range(1, self.num_matchings + 1)))
        object.__setattr__(self, "table", table)
        if table[0] < 0 or not all(math.isfinite(v) for v in table):
            raise InputError("t(n) must be finite and not negative.")
        if any(b <= a for a, b in pairwise(table)):
            raise InputError("t(n) must increase with n.")

    def matching_time(self, matching: Matching) -> float:
        return self.table[1] if matching else 0.0

    def round_time(self, matchings: Sequence[Matching]) -> float:
        return self._time(sum(1 for matching in matchings if matching))

    def _time(self, n: int) -> float:
        return self.table[n] if n < len(self.table) else float(self.t(n))

    def expected_time(self, matchings: Sequence[Matching], probabilities: Sequence[float]) -> float:
        """E t(number of active matchings): a Poisson-binomial expectation."""
        chances = count_chances((p, 1) for p in probabilities)
        return float(chances @ [self._time(n) for n in range(len(chances))])

    def costs(self, matchings: Sequence[Matching]) -> tuple[float, ...]:
        return (1.0,) * len(matchings)  # the constraint is on how many are active

    def allowance(self, matchings: Sequence[Matching], budget: float) -> float:
        """The s with t(s) = C_b · t(M), found by bisection."""
        low, high = 0.0, float(len(matchings))
        goal = budget * float(self.t(high))
        if budget >= 1:
            return high
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if self.t(middle) <= goal else (low, middle)
        return low

    def to_json(self) -> dict[str, Any]:
        return {"model": "scaled", "table": list(self.table)}


def count_chances(coins: Iterable[tuple[float, int]]) -> npt.NDArray[np.float64]:
    """The chances that 0, 1, … are active, where a coin of some probability activates several.

    >>> count_chances([(0.5, 2), (0.5, 1)]).tolist()
    [0.25, 0.25, 0.25, 0.25]
    """
    chances = np.ones(1)
    for p, number in coins:
        heads = np.zeros(number + 1)
        heads[0], heads[-1] = 1 - p, p
        chances = np.convolve(chances, heads)
    return chances


@dataclass(frozen=True)
class LinkSeconds(Timing):
    """Every link has its own time; a matching costs its slowest link.

    Where the topology knows latencies, a message whose size is `size_ratio` of the whole model's
    saves in proportion what is beyond them, and pays them once in each of its `num_phases`.

    >>> topology = Topology.from_links([(0, 1), (1, 2)], link_times=[0.5, 2.0])
    >>> LinkSeconds(topology).round_time([((0, 1),), ((1, 2),)])
    2.5
    """

    topology: Topology = field(repr=False)
    size_ratio: float = 1.0
    """The size of a message over that of a whole float32 model."""
    num_phases: int = 1
    """Messages one after another in a meeting."""
    unit = "seconds"

    def __post_init__(self) -> None:
        if self.topology.link_times is None:
            raise TopologyError(
                "the topology has no link times: give them with with_link_times or `matcha probe`."
            )
        if not (0 < self.size_ratio < math.inf and self.num_phases >= 1):
            raise InputError(
                f"messages have {self.size_ratio!r} of a model's size and {self.num_phases!r} "
                "phases: both must be positive."
            )

    @cached_property
    def seconds(self) -> Mapping[Link, float]:
        """The time of each link."""
        assert self.topology.link_times is not None
        waits = self.topology.link_latencies or (0.0,) * len(self.topology.links)
        each = zip(self.topology.link_times, waits, strict=True)
        times = [self.num_phases * w + self.size_ratio * (t - w) for t, w in each]
        return {link: times[e] for link, e in self.topology.columns.items()}

    def matching_time(self, matching: Matching) -> float:
        return max((self.seconds[link] for link in matching), default=0.0)

    def to_json(self) -> dict[str, Any]:
        whole = (self.size_ratio, self.num_phases) == (1.0, 1)
        message = {"size_ratio": self.size_ratio, "num_phases": self.num_phases}
        return {"model": "link-seconds", **({} if whole else message)}


@dataclass(frozen=True)
class RandomLinks(Timing):
    """Link times vary: a matching costs the mean, over samples, of its slowest link.

    `samples` has a row for each measurement of the whole network, a column for each link.
    """

    topology: Topology = field(repr=False)
    samples: tuple[tuple[float, ...], ...] = field(repr=False)
    unit = "seconds"

    def __post_init__(self) -> None:
        widths = {len(row) for row in self.samples}
        if widths != {len(self.topology.links)}:
            raise InputError(
                f"link time samples need a column for each of the {len(self.topology.links)} links."
            )
        values = np.array(self.samples)
        if not (np.isfinite(values) & (values > 0)).all():
            raise InputError("link time samples are positive seconds.")

    @cached_property
    def _values(self) -> Any:
        return np.array(self.samples)

    def matching_time(self, matching: Matching) -> float:
        if not matching:
            return 0.0
        columns = [self.topology.columns[link] for link in matching]
        return float(self._values[:, columns].max(axis=1).mean())

    def to_json(self) -> dict[str, Any]:
        return {"model": "random-links", "samples": [list(row) for row in self.samples]}


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedChannel:
    """A part of the underlay that several links run over: an uplink, a radio channel, a card."""

    links: tuple[Link, ...]
    """The links whose messages it carries."""
    seconds: float
    """How long one exchange over one of them keeps it busy; each way has its own lane."""


@dataclass(frozen=True)
class Underlay(Timing):
    """Links that share channels: a matching takes as long as its slowest link or busiest channel.

    Where two of a matching's links run over one channel, their messages queue there: the channel
    is busy for the sum of their times.

    >>> square = Topology.from_links([(0, 1), (1, 2), (2, 3), (3, 0)], link_times=[0.1] * 4)
    >>> timing = Underlay.racks(square, [[0, 1], [2, 3]], uplink=0.5)
    >>> timing.matching_time(((0, 1), (2, 3))), timing.matching_time(((0, 3), (1, 2)))
    (0.1, 1.0)
    """

    topology: Topology = field(repr=False)
    channels: tuple[SharedChannel, ...] = field(repr=False)
    unit = "seconds"

    def __post_init__(self) -> None:
        LinkSeconds(self.topology)  # refuses a topology without link times
        known = set(self.topology.links)
        for channel in self.channels:
            if not (math.isfinite(channel.seconds) and channel.seconds > 0):
                raise InputError(
                    f"a channel has {channel.seconds!r} seconds, but they are positive."
                )
            for link in channel.links:
                if link not in known:
                    raise InputError(f"a channel carries link {link}, which the topology lacks.")

    @classmethod
    def racks(
        cls, topology: Topology, racks: Sequence[Sequence[int]], *, uplink: float
    ) -> Underlay:
        """Workers in racks, each with one uplink that all links to other racks share.

        Args:
            topology: With link times, which hold for a link that has its channels to itself.
            racks: The worker numbers of each rack.
            uplink: Seconds that one exchange keeps an uplink busy.
        """
        rack = {worker: r for r, workers in enumerate(racks) for worker in workers}
        if sorted(w for workers in racks for w in workers) != list(range(topology.num_workers)):
            raise InputError("racks name every worker once, by number.")
        leaving: list[list[Link]] = [[] for _ in racks]
        for link in topology.links:
            ends = {rack[worker] for worker in link}
            for r in ends if len(ends) == 2 else ():
                leaving[r].append(link)
        channels = (SharedChannel(links=tuple(links), seconds=uplink) for links in leaving if links)
        return cls(topology, tuple(channels))

    @cached_property
    def loads(self) -> npt.NDArray[np.float64]:
        """Seconds that each channel (row) is busy with one exchange over each link (column)."""
        loads = np.zeros((len(self.channels), len(self.topology.links)))
        for row, channel in enumerate(self.channels):
            loads[row, [self.topology.columns[link] for link in channel.links]] = channel.seconds
        return loads

    def matching_time(self, matching: Matching) -> float:
        if not matching:
            return 0.0
        assert self.topology.link_times is not None
        columns = sorted({self.topology.columns[link] for link in matching})
        slowest = max(self.topology.link_times[e] for e in columns)
        return max(slowest, float(self.loads[:, columns].sum(axis=1).max(initial=0.0)))

    def to_json(self) -> dict[str, Any]:
        channels = [
            {"seconds": channel.seconds, "links": [list(link) for link in channel.links]}
            for channel in self.channels
        ]
        return {"model": "underlay", "channels": channels}


@dataclass(frozen=True, kw_only=True)
class Wired(Timing):
    """Another delay model whose messages are a fraction of a whole float32 model.

    >>> Wired(base=Units(), size_ratio=0.1).round_time([((0, 1),), ((1, 2),)])
    0.2
    """

    base: Timing
    size_ratio: float
    is_gathered: bool = False

    @property
    def unit(self) -> str:
        return self.base.unit

    def matching_time(self, matching: Matching) -> float:
        return self.size_ratio * self.base.matching_time(matching)

    def round_time(self, matchings: Sequence[Matching]) -> float:
        return self.size_ratio * self.base.round_time(matchings)

    def to_json(self) -> dict[str, Any]:
        gathered = {"gathered": True} if self.is_gathered else {}
        base = TIMINGS.to_json(self.base)
        return {"model": "wired", "size_ratio": self.size_ratio, "base": base, **gathered}


def default_timing(topology: Topology) -> Timing:
    """Seconds where the topology knows its link times, units elsewhere."""
    return Units() if topology.link_times is None else LinkSeconds(topology)


def all_reduce_time(
    timing: Timing, topology: Topology, slower: Mapping[Link, float] | None = None
) -> float:
    """The time of a ring all-reduce of a whole model, in the delay model's unit.

    In 2(m − 1) steps every worker sends 1/m of the model to the next and takes 1/m from the one
    before, all at once, so it takes 2(m − 1)/m times the slowest hop. A hop follows the quickest
    path of links, in the best order of workers found, and what hops share is not charged twice:
    that flatters the all-reduce, which others are compared with. Some links may be `slower` by
    factors. Messages that can only be gathered go m − 1 hops, whole.

    >>> from matcha.topology import families
    >>> all_reduce_time(Units(), families.ring(8)), all_reduce_time(Units(), families.path(8))
    (1.75, 3.5)
    """
    m = topology.num_workers
    hops = m - 1 if timing.is_gathered else 2 * (m - 1) / m
    return hops * ring_hop(timing, topology, slower)


def ring_hop(
    timing: Timing, topology: Topology, slower: Mapping[Link, float] | None = None
) -> float:
    """The time of the slowest hop of that ring, if it carried a whole model."""
    return _slowest_hop(timing, topology, tuple(sorted(slower.items())) if slower else ())


@lru_cache(maxsize=64)  # delay models are values
def _slowest_hop(
    timing: Timing, topology: Topology, factors: tuple[tuple[Link, float], ...]
) -> float:
    slower, m = dict(factors), topology.num_workers
    weights = {e: timing.matching_time((e,)) * slower.get(e, 1.0) for e in topology.links}
    if len(weights) == m * (m - 1) // 2 and len(set(weights.values())) == 1:
        return next(iter(weights.values()))  # any order will do, and no way round is quicker

    import networkx as nx

    graph = nx.Graph()
    for link, weight in weights.items():
        graph.add_edge(*link, weight=weight)
    tree = nx.minimum_spanning_tree(graph)
    depths = nx.single_source_shortest_path_length(tree, 0)
    # Even depths on the way down, odd ones on the way up: neighbors are three links apart at most.
    order = [
        worker
        for _, worker, way in nx.dfs_labeled_edges(tree, source=0)
        if way == ("reverse" if depths[worker] % 2 else "forward")
    ]
    hops = list(zip(order, [*order[1:], order[0]], strict=True))
    slowest = max(float(nx.dijkstra_path_length(graph, i, j)) for i, j in hops)
    if len(order) > _SEARCHED_UP_TO:
        return slowest
    lengths = nx.floyd_warshall_numpy(graph, nodelist=range(len(order)))
    for limit in np.unique(lengths[(lengths > 0) & (lengths < slowest)]):
        if _has_ring(lengths <= limit):
            return float(limit)
    return slowest


def _has_ring(near: npt.NDArray[np.bool_]) -> bool:
    """Whether a ring through all workers is found, in a bounded search from the first."""
    m, left = len(near), _RING_STEPS
    others = [set(np.flatnonzero(row).tolist()) - {i} for i, row in enumerate(near)]

    def extend(last: int, free: set[int]) -> bool:
        nonlocal left
        left -= 1
        if not free:
            return 0 in others[last]
        # Those with the fewest ways on come first, or they are never reached.
        ways = sorted(others[last] & free, key=lambda n: len(others[n] & free))
        return left > 0 and any(extend(n, free - {n}) for n in ways)

    return min(map(len, others)) >= min(2, m - 1) and extend(0, set(range(1, m)))


def _read_link_seconds(document: dict[str, Any], topology: Topology) -> Timing:
    size_ratio = document.get("size_ratio", document.get("share", 1.0))  # as 0.2 wrote it
    num_phases = document.get("num_phases", document.get("halves", 1))
    return LinkSeconds(topology, float(size_ratio), operator.index(num_phases))


def _read_scaled(document: dict[str, Any], topology: Topology) -> Timing:
    table = [float(v) for v in document["table"]]
    grid = np.arange(len(table))
    return Scaled(lambda n: float(np.interp(n, grid, table)), len(table) - 1)


def _read_underlay(document: dict[str, Any], topology: Topology) -> Timing:
    channels = []
    for channel in document["channels" if "channels" in document else "wires"]:  # as 0.2 wrote it
        links = tuple((int(i), int(j)) for i, j in channel["links"])
        channels.append(SharedChannel(links=links, seconds=float(channel["seconds"])))
    return Underlay(topology, tuple(channels))


def _read_wired(document: dict[str, Any], topology: Topology) -> Timing:
    base = TIMINGS.from_json(document["base"], topology)
    ratio = document["size_ratio"] if "size_ratio" in document else document["share"]  # by 0.2
    gathered = document.get("gathered", False) is True
    return Wired(base=base, size_ratio=float(ratio), is_gathered=gathered)


TIMINGS: Registry[Timing] = Registry(
    "delay model",
    "model",
    "matcha.timing.register_timing",
    {
        "units": lambda document, topology: Units(),
        "link-seconds": _read_link_seconds,
        "random-links": lambda document, topology: RandomLinks(
            topology, tuple(map(tuple, document["samples"]))
        ),
        "scaled": _read_scaled,
        "underlay": _read_underlay,
        "wired": _read_wired,
    },
)
"""How saved delay models are read, by name; `read` takes (document, topology)."""
register_timing = TIMINGS.register
