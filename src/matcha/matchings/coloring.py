"""Edge colourings under construction: which colour each link has, and Kempe's exchanges.

A proper colouring gives links that share a worker different colours; each colour class is a
matching. The links of two colours a and b form paths and even cycles, Kempe chains; exchanging a
and b along one keeps the colouring proper. That one move repairs a greedy colouring that needed
too many colours, and walks among colourings of the same size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from matcha.errors import TopologyError
from matcha.topology import Link, Matching

_NOBODY = -1
_REPAIR_ATTEMPTS = 200
_MAX_CELLS = 500_000_000  # of the table below, 8 bytes each: a star of 22,000 workers


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
        """The colour classes, each sorted."""
        classes: list[list[Link]] = [[] for _ in range(self.num_colors)]
        for i, row in enumerate(self.partner):
            for color, j in enumerate(row):
                if i < j:
                    classes[color].append((i, j))
        return tuple(tuple(links) for links in classes)

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
        path = [worker]
        color, other = a, b
        here = self.partner[worker][a]
        while here != _NOBODY:
            path.append(here)
            if here == worker:
                break
            color, other = other, color
            here = self.partner[here][color]
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
    for a in free_i:
        if a in free_j:
            coloring.paint(link, a)
            return True
    for a in free_i:
        for b in free_j:
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
