"""Step 1: the links split into matchings, which can talk at the same time; and verifiers.

A matching is a set of links that share no worker, so all of them can talk at once. Splitting the
links into M matchings is edge colouring: by Vizing's theorem M is Δ or Δ+1, with Δ the largest
degree. The paper's other subgraphs, single links and cliques, are offered as well; a clique is a
group of matchings that share one coin.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise, product

import numpy as np

from matcha.errors import PlanError, TopologyError
from matcha.topology import Link, Matching, Topology, check_matchings

Groups = tuple[tuple[int, ...], ...]

_GROUPING_WORK = 2_000_000
"""Colour pairs times workers up to which slow links are regrouped: a second or two per sweep."""
_COMPLETE_UP_TO = 128
"""Workers up to which a complete graph is searched like any other, which every third time fails."""
_NOBODY = -1
_REPAIR_ATTEMPTS = 200
_MAX_CELLS = 500_000_000  # of a colouring's table, 8 bytes each: a star of 22,000 workers


def decompose(topology: Topology, *, seed: int = 0) -> tuple[Matching, ...]:
    """Split the links into Δ matchings where a quick search finds them, else Δ+1; never more.

    Where the topology has link times, slow links are put together: a matching costs its slowest
    link, so the sum over matchings is what a full exchange takes.

    Args:
        topology: The workers and their links.
        seed: Decides the repairs of the search.

    Returns:
        The matchings, largest first (costliest first where there are link times).

    >>> from matcha.topology import families
    >>> decompose(families.ring(4))
    (((0, 1), (2, 3)), ((0, 3), (1, 2)))

    One-way links are split into Δ sets in which every worker sends at most once and receives at
    most once (König): they too can all talk at once.

    >>> decompose(Topology.from_links([(0, 1), (1, 2), (2, 0)], directed=True))
    (((0, 1), (1, 2), (2, 0)),)
    """
    if topology.directed:
        return sort_matchings(topology, _permutations(topology))
    best = _fewest_colors(topology, _by_degree(topology), seed)
    if topology.link_times is not None:
        times = _times(topology)
        by_time = sorted(topology.links, key=lambda link: (-times[link], link))
        other = _fewest_colors(topology, by_time, seed)
        candidates = [_group_by_time(topology, matchings, times) for matchings in (best, other)]
        best = min(candidates, key=lambda found: (len(found), _full_exchange(found, times)))
    return sort_matchings(topology, best)


def _permutations(topology: Topology) -> tuple[Matching, ...]:
    """The links of a directed topology as Δ partial permutations: a bipartite colouring."""
    import rustworkx

    m = topology.num_workers
    graph = rustworkx.PyGraph(multigraph=False)
    graph.add_nodes_from(range(2 * m))
    graph.add_edges_from_no_data([(i, m + j) for i, j in topology.links])
    colors = rustworkx.graph_bipartite_edge_color(graph)
    in_order = [colors[edge] for edge in range(len(topology.links))]
    return classes_of(topology.links, in_order, topology.max_degree)


def classes_of(links: Sequence[Link], colors: Iterable[int], number: int) -> tuple[Matching, ...]:
    """The links of each of some colours, in the order of the links.

    >>> classes_of([(0, 1), (1, 2), (2, 3)], [0, 1, 0], 2)
    (((0, 1), (2, 3)), ((1, 2),))
    """
    classes: list[list[Link]] = [[] for _ in range(number)]
    for link, color in zip(links, colors, strict=True):
        classes[color].append(link)
    return tuple(map(tuple, classes))


def single_links(topology: Topology) -> tuple[Matching, ...]:
    """Every link alone (section 3, "Extension").

    >>> from matcha.topology import families
    >>> single_links(families.path(3))
    (((0, 1),), ((1, 2),))
    """
    return tuple((link,) for link in topology.links)


def cliques(topology: Topology) -> tuple[tuple[Matching, ...], Groups]:
    """Split the links into cliques, greedily the largest first (section 3, "Extension").

    Each clique's links are coloured into matchings that are active together: one group.

    Returns:
        The matchings, and the groups as positions among them.

    >>> from matcha.topology import families
    >>> cliques(families.complete(4))[1]
    ((0, 1, 2),)
    """
    matchings: list[Matching] = []
    groups: list[tuple[int, ...]] = []
    for workers in _clique_partition(topology):
        inside = Topology.from_links(list(combinations(range(len(workers)), 2)))
        first = len(matchings)
        matchings += [
            tuple(sorted((workers[i], workers[j]) for i, j in matching))
            for matching in decompose(inside)
        ]
        groups.append(tuple(range(first, len(matchings))))
    return tuple(matchings), tuple(groups)


def sort_matchings(topology: Topology, matchings: Iterable[Matching]) -> tuple[Matching, ...]:
    """Matchings in the order plans list them: costliest, then largest, then by their links."""
    times = _times(topology)
    kept = [tuple(sorted(matching)) for matching in matchings if matching]
    return tuple(sorted(kept, key=lambda m: (-_slowest(m, times), -len(m), m)))


# -- verifiers ----------------------------------------------------------------------------------


def is_matching(links: Iterable[Link]) -> bool:
    """Whether no two links share a worker.

    >>> is_matching([(0, 1), (2, 3)]), is_matching([(0, 1), (1, 2)])
    (True, False)
    """
    ends = [end for link in links for end in link]
    return len(ends) == len(set(ends))


def is_decomposition(topology: Topology, matchings: Sequence[Matching]) -> bool:
    """Whether the matchings are proper and together hold each link exactly once.

    >>> from matcha.topology import families
    >>> is_decomposition(families.path(3), [((0, 1),), ((1, 2),)])
    True
    """
    try:
        check_decomposition(topology, matchings)
    except PlanError:
        return False
    return True


def is_clique_partition(
    topology: Topology, matchings: Sequence[Matching], groups: Sequence[Sequence[int]]
) -> bool:
    """Whether the matchings decompose the topology and each group holds all links of a clique.

    >>> from matcha.topology import families
    >>> is_clique_partition(families.complete(5), *cliques(families.complete(5)))
    True
    """
    if sorted(j for group in groups for j in group) != list(range(len(matchings))):
        return False
    for group in groups:
        links = [link for j in group for link in matchings[j]]
        size = len({end for link in links for end in link})
        if len(links) != size * (size - 1) // 2:
            return False
    return is_decomposition(topology, matchings)


def check_decomposition(topology: Topology, matchings: Sequence[Matching]) -> None:
    """Refuse matchings that do not split the topology's links."""
    check_matchings(topology, tuple(matchings))
    once = "a decomposition uses each link once."
    uses = Counter(link for matching in matchings for link in matching)
    for number, matching in enumerate(matchings):
        if not matching:
            raise PlanError(f"matching {number} is empty: leave it out.")
    for link, count in uses.items():
        if count > 1:
            raise PlanError(f"link {link} is in two matchings: {once}")
    for link in topology.links:
        if link not in uses:
            raise PlanError(f"link {link} is in no matching: {once}")


# -- colouring ----------------------------------------------------------------------------------


def _fewest_colors(topology: Topology, order: Sequence[Link], seed: int) -> tuple[Matching, ...]:
    """Colour links in an order: Δ colours if a search finds them, else Δ+1."""
    m, delta = topology.num_workers, topology.max_degree
    complete = topology.link_times is None and 2 * len(order) == m * (m - 1)
    if complete and m > _COMPLETE_UP_TO:
        return round_robin(m)
    # A matching holds at most ⌊m/2⌋ links: an overfull graph cannot do with Δ.
    if len(order) <= delta * (m // 2):
        found = color_links(order, m, delta, seed=seed)
        if found is not None:
            return found.matchings()
        if complete:
            return round_robin(m)
    found = color_links(order, m, delta + 1, seed=seed)
    return _misra_gries(topology) if found is None else found.matchings()


def round_robin(num_workers: int) -> tuple[Matching, ...]:
    """A tournament in which all workers meet, in matchings of ⌊m/2⌋ links each (circle method).

    >>> round_robin(3)
    (((1, 2),), ((0, 2),), ((0, 1),))
    """
    size = num_workers + num_workers % 2
    days = []
    for day in range(size - 1):
        pairs = [(size - 1, day)]
        pairs += [((day + k) % (size - 1), (day - k) % (size - 1)) for k in range(1, size // 2)]
        days.append(tuple(sorted((min(p), max(p)) for p in pairs if max(p) < num_workers)))
    return tuple(pairs for pairs in days if pairs)


def _misra_gries(topology: Topology) -> tuple[Matching, ...]:
    """At most Δ+1 colours, guaranteed (Misra and Gries, 1992)."""
    import rustworkx

    graph = rustworkx.PyGraph(multigraph=False)
    graph.add_nodes_from(range(topology.num_workers))
    graph.add_edges_from_no_data(list(topology.links))
    colors = rustworkx.graph_misra_gries_edge_color(graph)
    in_order = [colors[edge] for edge in range(len(topology.links))]
    return classes_of(topology.links, in_order, topology.max_degree + 1)


def _group_by_time(
    topology: Topology, matchings: Sequence[Matching], times: dict[Link, float]
) -> tuple[Matching, ...]:
    """Exchange colours so that slow links share matchings: lower the sum of the slowest.

    Two matchings a and b fall apart into Kempe chains, and each may be turned over. Their joint
    cost is least when every chain has its slower side in a: then b is as quick as it can be.
    """
    coloring = Coloring.from_matchings(matchings, topology.num_workers)
    pairs = list(combinations(range(coloring.num_colors), 2))
    cost = _full_exchange(matchings, times)
    while len(pairs) * topology.num_workers <= _GROUPING_WORK:
        for a, b in pairs:
            for chain in coloring.chains(a, b):
                sides = [0.0, 0.0]
                for i, j in pairwise(chain):
                    side = int(coloring.partner[i][a] != j)
                    sides[side] = max(sides[side], times[(i, j) if i < j else (j, i)])
                if sides[1] > sides[0]:
                    coloring.exchange(chain, a, b)
        lower = _full_exchange(coloring.matchings(), times)
        if lower >= cost * (1.0 - 1e-12):
            break
        cost = lower
    return tuple(matching for matching in coloring.matchings() if matching)


def _by_degree(topology: Topology) -> list[Link]:
    """Links of busy workers first: they have the least choice of colours."""
    degree = topology.degrees
    return sorted(topology.links, key=lambda link: (-degree[link[0]] - degree[link[1]], link))


def _clique_partition(topology: Topology) -> list[list[int]]:
    """Workers of cliques that split the links: grow one from each link left, in order."""
    left = {worker: set(topology.neighbors(worker)) for worker in range(topology.num_workers)}
    found = []
    for link in _by_degree(topology):
        if link[1] not in left[link[0]]:
            continue
        clique = list(link)
        shared = left[link[0]] & left[link[1]]
        while shared:
            # The worker that keeps most of the others in play.
            nearest = max(sorted(shared), key=lambda w: len(shared & left[w]))
            clique.append(nearest)
            shared &= left[nearest]
        for i in clique:
            left[i].difference_update(clique)
        found.append(sorted(clique))
    return found


def _times(topology: Topology) -> dict[Link, float]:
    times = topology.link_times or (1.0,) * len(topology.links)
    return dict(zip(topology.links, times, strict=True))


def _slowest(matching: Matching, times: dict[Link, float]) -> float:
    return max(times[link] for link in matching)


def _full_exchange(matchings: Iterable[Matching], times: dict[Link, float]) -> float:
    return sum(_slowest(matching, times) for matching in matchings if matching)


# -- colourings under construction ----------------------------------------------------------------
# A proper colouring gives links that share a worker different colours; each colour class is a
# matching. The links of two colours a and b form paths and even cycles, Kempe chains; exchanging a
# and b along one keeps the colouring proper. That one move repairs a greedy colouring that needed
# too many colours, and walks among colourings of the same size.


class Coloring:
    """A proper partial edge colouring that can be changed; the search's working state."""

    def __init__(self, num_workers: int, num_colors: int) -> None:
        if num_workers * num_colors > _MAX_CELLS:
            raise TopologyError(
                f"{num_workers:,} workers, one of which has about {num_colors:,} neighbours, take "
                f"{8 * num_workers * num_colors / 1e9:,.0f} GB to split into matchings: choose "
                "fewer workers or fewer neighbours."
            )
        self.num_colors = num_colors
        self.partner = [[_NOBODY] * num_colors for _ in range(num_workers)]
        """partner[i][c]: the worker that i meets in colour c, or −1."""

    @classmethod
    def from_matchings(cls, matchings: Sequence[Matching], num_workers: int) -> Coloring:
        """The colouring whose classes are the matchings."""
        coloring = cls(num_workers, len(matchings))
        for color, matching in enumerate(matchings):
            for link in matching:
                coloring.paint(link, color)
        return coloring

    def matchings(self) -> tuple[Matching, ...]:
        """The colour classes, each sorted; those without a link are empty."""
        classes: list[list[Link]] = [[] for _ in range(self.num_colors)]
        for i, row in enumerate(self.partner):
            for color, j in enumerate(row):
                if i < j:
                    classes[color].append((i, j))
        return tuple(map(tuple, classes))

    def paint(self, link: Link, color: int) -> None:
        """Give an uncoloured link a colour that is free at both its ends."""
        i, j = link
        self.partner[i][color], self.partner[j][color] = j, i

    def free(self, worker: int) -> list[int]:
        """The colours that no link of the worker has."""
        return [c for c, other in enumerate(self.partner[worker]) if other == _NOBODY]

    def chain(self, worker: int, a: int, b: int) -> list[int]:
        """The workers of the Kempe chain through `worker`, in order; a cycle repeats its first."""
        forward = self._walk(worker, a, b)
        if len(forward) > 1 and forward[-1] == worker:
            return forward
        return [*self._walk(worker, b, a)[:0:-1], *forward]

    def _walk(self, worker: int, a: int, b: int) -> list[int]:
        path, here = [worker], self.partner[worker][a]
        while here != _NOBODY:
            path.append(here)
            if here == worker:
                break
            a, b = b, a
            here = self.partner[here][a]
        return path

    def exchange(self, chain: Iterable[int], a: int, b: int) -> None:
        """Swap the colours a and b along a whole Kempe chain."""
        for worker in set(chain):
            row = self.partner[worker]
            row[a], row[b] = row[b], row[a]

    def chains(self, a: int, b: int) -> list[list[int]]:
        """All Kempe chains of two colours."""
        seen: set[int] = set()
        found = []
        for worker, row in enumerate(self.partner):
            if worker not in seen and (row[a] != _NOBODY or row[b] != _NOBODY):
                chain = self.chain(worker, a, b)
                seen.update(chain)
                found.append(chain)
        return found


def color_links(
    links: Sequence[Link], num_workers: int, num_colors: int, *, seed: int = 0
) -> Coloring | None:
    """A proper colouring in `num_colors` colours by a quick search, or None.

    Links are painted in the order given with the first colour free at both ends. A link that
    finds none is painted after an exchange along a Kempe chain has freed one; where no single
    exchange helps, a few random ones are tried.
    """
    coloring = Coloring(num_workers, num_colors)
    rng = np.random.default_rng(seed)
    used = [0] * num_workers  # bit masks of the colours at each worker
    everything = (1 << num_colors) - 1
    stuck = []
    for i, j in links:
        common = everything & ~(used[i] | used[j])
        if common:
            lowest = common & -common
            used[i] |= lowest
            used[j] |= lowest
            coloring.paint((i, j), lowest.bit_length() - 1)
        else:
            stuck.append((i, j))
    attempts = _REPAIR_ATTEMPTS
    for link in stuck:
        while not _paint_by_exchange(coloring, link):
            attempts -= 1
            if attempts < 0:
                return None
            _shake(coloring, link, rng)
    return coloring


def _paint_by_exchange(coloring: Coloring, link: Link) -> bool:
    """Paint a link, exchanging one Kempe chain if need be; False if no single one helps."""
    i, j = link
    free_i, free_j = coloring.free(i), coloring.free(j)
    both = next((a for a in free_i if a in free_j), None)
    if both is not None:
        coloring.paint(link, both)
        return True
    for a, b in product(free_i, free_j):
        # i lacks a and has b: its chain starts here. If it does not end at j, exchanging
        # it frees b at i and leaves b free at j.
        chain = coloring.chain(i, b, a)
        if j not in (chain[0], chain[-1]):
            coloring.exchange(chain, a, b)
            coloring.paint(link, b)
            return True
    return False


def _shake(coloring: Coloring, link: Link, rng: np.random.Generator) -> None:
    """Exchange a random chain through one end of the link, or of a neighbour's."""
    around = [w for end in link for w in (end, *coloring.partner[end]) if w != _NOBODY]
    worker = around[rng.integers(len(around))]
    a, b = rng.choice(coloring.num_colors, size=2, replace=False)
    coloring.exchange(coloring.chain(worker, int(a), int(b)), int(a), int(b))
