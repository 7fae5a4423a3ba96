"""The table of links: which links are up, as far as the news has travelled.

Each link has a version that grows: even means up, odd means down. Both ends of a link reckon the
same next version, news spreads along links, and of two versions the larger is newer. Whoever can be
reached over links that are up is a member; so a dead worker, a cut and an island are the same thing
here, and nobody has to decide which it was.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from matcha.topology import Link, Topology

__all__ = ["FIRST_UP", "LinkTable", "Tree", "breadth_first"]

_DOWN = 1
FIRST_UP = 2
"""The version of a link that has come up and never gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A worker's place in a spanning tree of the members."""

    members: tuple[int, ...]
    parent: int | None
    children: tuple[int, ...]
    digest: str
    """The same for two workers if and only if they hold the same tree."""


class LinkTable:
    """What one worker knows about all links.

    >>> table = LinkTable(0, Topology.from_links([(0, 1), (1, 2)]))
    >>> table.raise_link(1, 1), table.members
    (2, (0, 1))
    >>> table.merge({(1, 2): 4}), table.members
    ({(1, 2): 4}, (0, 1, 2))
    >>> table.lower_link(1), table.members
    (3, (0,))
    """

    def __init__(self, rank: int, topology: Topology) -> None:
        self.rank = rank
        self.topology = topology
        self.versions: dict[Link, int] = dict.fromkeys(topology.links, _DOWN)
        self._tree: Tree | None = None

    def link(self, peer: int) -> Link:
        """This worker's link to a neighbour."""
        return (self.rank, peer) if self.rank < peer else (peer, self.rank)

    def raise_link(self, peer: int, theirs: int) -> int:
        """Count a link of this worker as up; `theirs` is the version that the other end has."""
        link = self.link(peer)
        self.versions[link] = (max(self.versions[link], theirs) | 1) + 1
        self._tree = None
        return self.versions[link]

    def lower_link(self, peer: int) -> int:
        """Count a link of this worker as down."""
        link = self.link(peer)
        self.versions[link] |= 1
        self._tree = None
        return self.versions[link]

    def merge(self, news: Mapping[Link, int]) -> dict[Link, int]:
        """Take what is newer and return it, to be told on.

        Each end knows its own links best: news that contradicts what this worker sees of its own
        link (an earlier life's) is answered with a newer version.
        """
        fresh: dict[Link, int] = {}
        for link, version in news.items():
            mine = self.versions.get(link)
            if mine is None or version <= mine:
                continue
            if self.rank in link and version % 2 != mine % 2:
                version += 1
            self.versions[link] = fresh[link] = version
        if fresh:
            self._tree = None
        return fresh

    def is_up(self, link: Link) -> bool:
        """Whether a link is up, as far as is known."""
        return self.versions[link] % 2 == 0

    def has_been_up(self, link: Link) -> bool:
        """Whether a link has ever been up, as far as is known."""
        return self.versions[link] > _DOWN

    def seen(self) -> dict[Link, int]:
        """Links that have been up, as far as is known."""
        return {link: version for link, version in self.versions.items() if version > _DOWN}

    def unseen(self) -> list[Link]:
        """Links that have never been up, as far as is known."""
        return [link for link, version in self.versions.items() if version <= _DOWN]

    @property
    def members(self) -> tuple[int, ...]:
        """Who can be reached from this worker over links that are up, itself included; sorted."""
        return self.tree.members

    @property
    def tree(self) -> Tree:
        """This worker's place in the members' spanning tree, whose root is the lowest rank."""
        if self._tree is None:  # many changes may come before anybody looks
            self._tree = self._grow()
        return self._tree

    def islands(self) -> list[tuple[int, ...]]:
        """All workers in groups that can reach one another, by the latest news."""
        around = self._around()
        left = set(range(self.topology.num_workers))
        groups = []
        while left:
            parents = breadth_first(min(left), around)
            groups.append(tuple(sorted(parents)))
            left -= parents.keys()
        return groups

    def _around(self) -> dict[int, list[int]]:
        around: dict[int, list[int]] = {}
        for i, j in self.topology.links:  # sorted, so neighbours are too
            if self.is_up((i, j)):
                around.setdefault(i, []).append(j)
                around.setdefault(j, []).append(i)
        return around

    def _grow(self) -> Tree:
        around = self._around()
        members = sorted(breadth_first(self.rank, around))
        parents = breadth_first(members[0], around)
        edges = sorted((child, parent) for child, parent in parents.items())
        return Tree(
            members=tuple(members),
            parent=parents[self.rank],
            children=tuple(child for child, parent in edges if parent == self.rank),
            digest=hashlib.sha256(repr(edges).encode()).hexdigest()[:16],
        )


def breadth_first(root: int, around: Mapping[int, Iterable[int]]) -> dict[int, int | None]:
    """Everybody within reach and whom each was reached from."""
    parents: dict[int, int | None] = {root: None}
    queue = deque([root])
    while queue:
        here = queue.popleft()
        for there in around.get(here, ()):
            if there not in parents:
                parents[there] = here
                queue.append(there)
    return parents
