"""Link state: which links are up, as far as updates have travelled, and what workers noted.

Each link has a version that grows: even means up, odd means down. Both ends of a link compute the
same next version, updates travel along links, and of two versions the larger is newer. Members are
the workers that can be reached over links that are up; so a dead worker, a cut link and an island
are the same thing here, and no worker has to decide which one it is.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from matcha.topology import Link, Topology

Note = tuple[int, str]
"""A version that grows, and what a worker published about itself."""

_DOWN = 1
FIRST_UP = 2
"""The version of a link that has come up and never gone down."""
_MAX_JUMP = 1 << 40  # a version that grows by more than this was not counted up by its link's ends
_MAX_KEY, _MAX_VALUE = 64, 1024  # characters of a note
_MAX_NOTES = 64  # per worker
_NEW_LINK = 3  # down: it has yet to come up, and no collective call waits for it
MAX_NEW = 1024
"""How many numbers above all others a worker that joins may have."""
_MAX_EARLY = 1 << 14  # links of which this worker may hear before it knows of them


class Phase(enum.Enum):
    """Where a worker over links of our own is between its start and its end.

    By these ways, which all workers go:

                  a neighbour trains already
    STARTING ──────────────────────────────▶ NEEDS_STATE
        │                                      │      ▲
        │ start_at        start_at             │      │ leave: it fell far behind
        └──────────────▶  RUNNING  ◀───────────┘      │
                             └────────────────────────┘
    and from each of them, by close(), to CLOSED.

    STARTING     No worker trains yet. The first collective call ends when all links have been up.
    NEEDS_STATE  Others train: this worker takes a neighbour's state first.
    RUNNING      It has a state and takes part.
    CLOSED       It has said goodbye to its neighbours.
    """

    STARTING = "starting"
    NEEDS_STATE = "needs a state"
    RUNNING = "running"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class MembershipChange:
    """A worker was lost or came (back), as this worker learnt it."""

    iteration: int
    seconds: float
    """On the clock of `time.monotonic`."""
    worker: int
    is_member: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A worker's place in a spanning tree of the members, whose root is the lowest rank."""

    members: tuple[int, ...]
    parent: int | None
    children: tuple[int, ...]
    digest: str
    """The same for two workers if and only if they hold the same tree."""


class LinkVersions:
    """What one worker knows about all links.

    >>> versions = LinkVersions(0, Topology.from_links([(0, 1), (1, 2)]))
    >>> versions.raise_link(1, 1), versions.members, versions.tree.members
    (2, (0, 1), (0, 1, 2))
    >>> versions.merge({(1, 2): 4}), versions.members
    ({(1, 2): 4}, (0, 1, 2))
    >>> versions.lower_link(1), versions.members
    (3, (0,))
    """

    def __init__(self, rank: int, topology: Topology) -> None:
        self.rank = rank
        self.versions: dict[Link, int] = dict.fromkeys(topology.links, _DOWN)
        self._early: dict[Link, int] = {}
        self._members: tuple[int, ...] | None = None
        self._tree: Tree | None = None

    def link(self, peer: int) -> Link:
        """This worker's link to a neighbour."""
        return (self.rank, peer) if self.rank < peer else (peer, self.rank)

    def raise_link(self, peer: int, theirs: int) -> int:
        """Count a link of this worker as up; `theirs` is the version that the other end has."""
        link = self.link(peer)
        self._set({link: (max(self.versions[link], theirs) | 1) + 1})
        return self.versions[link]

    def lower_link(self, peer: int) -> int:
        """Count a link of this worker as down."""
        link = self.link(peer)
        self._set({link: self.versions[link] | 1})
        return self.versions[link]

    def merge(self, found: Mapping[Link, int]) -> dict[Link, int]:
        """Take over newer versions and return them, to be sent on.

        Each end knows its own links best: a version that contradicts what this worker sees of its
        own link (an earlier process's) is answered with a newer one.
        """
        fresh: dict[Link, int] = {}
        early: dict[Link, int] = {}
        for link, version in found.items():
            mine = self.versions.get(link)
            if mine is None:
                if version > self._early.get(link, 0) and len(self._early) < _MAX_EARLY:
                    self._early[link] = early[link] = version
            elif _is_newer(version, mine):
                contradicts = self.rank in link and version % 2 != mine % 2
                fresh[link] = version + contradicts
        self._set(fresh)
        return fresh | early

    def grow(self, topology: Topology, gone: Collection[int]) -> dict[Link, int]:
        """Know of other links: those of a topology between workers that are not gone.

        Returns what others told of the new ones before, put right where they are this worker's.
        """
        links = [link for link in topology.links if not {*link} & {*gone}]
        self.versions = {link: self.versions.get(link, _NEW_LINK) for link in links}
        self._members = self._tree = None
        heard = {link: self._early.pop(link) for link in links if link in self._early}
        return self.merge(heard)

    def complete(self) -> None:
        """Count every link as having been up: the workers have agreed that the start is over."""
        self._set(dict.fromkeys(self.unseen(), FIRST_UP))

    def has_been_up(self, peer: int) -> bool:
        """Whether this worker's link to a neighbour has ever been up."""
        return self.versions[self.link(peer)] > _DOWN

    def seen(self) -> dict[Link, int]:
        """Links that have been up, as far as is known."""
        return {link: version for link, version in self.versions.items() if version > _DOWN}

    def unseen(self) -> list[Link]:
        """Links that have never been up, as far as is known."""
        return [link for link, version in self.versions.items() if version <= _DOWN]

    @property
    def members(self) -> tuple[int, ...]:
        """Workers that this one can reach over links that are up, itself included; sorted."""
        if self._members is None:
            around = self._neighbors(lambda version: version % 2 == 0)
            self._members = tuple(sorted(_breadth_first(self.rank, around)))
        return self._members

    @property
    def tree(self) -> Tree:
        """This worker's place in the spanning tree; links that have yet to come up count as up.

        So all workers hold the same tree from the start on.
        """
        if self._tree is None:  # many changes may come before the next look
            around = self._neighbors(lambda version: version == _DOWN or version % 2 == 0)
            members = tuple(sorted(_breadth_first(self.rank, around)))
            parents = _breadth_first(members[0], around)
            edges = sorted((child, parent) for child, parent in parents.items())
            self._tree = Tree(
                members=members,
                parent=parents[self.rank],
                children=tuple(child for child, parent in edges if parent == self.rank),
                digest=hashlib.sha256(repr(edges).encode()).hexdigest()[:16],
            )
        return self._tree

    def _set(self, versions: Mapping[Link, int]) -> None:
        if versions:
            self.versions.update(versions)
            self._members = self._tree = None

    def _neighbors(self, counts: Callable[[int], bool]) -> dict[int, list[int]]:
        around: dict[int, list[int]] = {}
        for (i, j), version in self.versions.items():  # sorted, so neighbours are too
            if counts(version):
                around.setdefault(i, []).append(j)
                around.setdefault(j, []).append(i)
        return around


def _breadth_first(root: int, around: Mapping[int, Iterable[int]]) -> dict[int, int | None]:
    """All workers within reach, with the one from which each was reached."""
    parents: dict[int, int | None] = {root: None}
    queue = deque([root])
    while queue:
        here = queue.popleft()
        for there in around.get(here, ()):
            if there not in parents:
                parents[there] = here
                queue.append(there)
    return parents


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What a worker tells its neighbours, which send on what is new to them.

    Only the latest of each thing counts, so updates that wait to be sent are merged.

    >>> first = Update(links={(0, 1): 3, (1, 2): 2})
    >>> both = first | Update(links={(0, 1): 4})
    >>> both.links, both.without(first).links, bool(Update())
    ({(0, 1): 4, (1, 2): 2}, {(0, 1): 4}, False)
    >>> Update.decode(both.encode(), Topology.from_links([(0, 1), (1, 2)])) == both
    True
    """

    links: Mapping[Link, int] = field(default_factory=dict)
    """Versions of links."""
    notes: Mapping[tuple[int, str], Note] = field(default_factory=dict)
    """What workers published about themselves, by worker and key."""

    def __bool__(self) -> bool:
        return bool(self.links or self.notes)

    def __or__(self, newer: Update) -> Update:
        links = {**self.links, **newer.links}
        return Update(links=links, notes={**self.notes, **newer.notes})

    def without(self, known: Update) -> Update:
        """What is left of it for a worker that knows something."""
        links = {link: v for link, v in self.links.items() if known.links.get(link) != v}
        notes = {key: note for key, note in self.notes.items() if known.notes.get(key) != note}
        return Update(links=links, notes=notes)

    def encode(self) -> bytes:
        """Encode as the content of a frame."""
        links = [[*link, version] for link, version in self.links.items()]
        notes = [[*key, *note] for key, note in self.notes.items()]
        return json.dumps({"links": links, "notes": notes}).encode()

    @classmethod
    def decode(
        cls, content: bytes | bytearray, topology: Topology, *, may_grow: bool = False
    ) -> Update:
        """Check and read the content of a frame; raises `ValueError`.

        Only with `may_grow` it may be about links and workers of which this one has yet to hear.
        """
        try:
            document: Any = json.loads(content)
            links = {(i, j): _version(version) for i, j, version in document["links"]}
            notes = {
                (rank, key): (_version(version), value)
                for rank, key, version, value in document["notes"]
            }
        except (TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"not an update: {error!r}") from None
        known = frozenset(topology.links)
        most = topology.num_workers + (MAX_NEW if may_grow else 0)
        for i, j in links:
            are_numbers = type(i) is type(j) is int
            if not are_numbers or not ((i, j) in known or (may_grow and 0 <= i < j < most)):
                raise ValueError(f"({i!r}, {j!r}) is not a link")
        for (rank, key), (_, value) in notes.items():
            if type(rank) is not int or not 0 <= rank < most:
                raise ValueError(f"a note about worker {rank!r}, which does not exist")
            if not isinstance(key, str) or not isinstance(value, str):
                raise ValueError("a note that is not text")
            if len(key) > _MAX_KEY or len(value) > _MAX_VALUE:
                raise ValueError("a note that is too long")
        return cls(links=links, notes=notes)


def max_update_bytes(topology: Topology, *, may_grow: bool = False) -> int:
    """The most bytes of an update about a topology's links and workers."""
    others, notes = 1 << (22 if may_grow else 20), 2 * _MAX_VALUE * _MAX_NOTES
    return others + 64 * len(topology.links) + notes * topology.num_workers


class Notes:
    """What workers published about themselves, as far as updates have travelled.

    >>> notes, others = Notes(0), Notes(1)
    >>> others.merge(notes.set("away", "yes")), others.get(0, "away")
    (({(0, 'away'): (1, 'yes')}, []), 'yes')
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.all: dict[tuple[int, str], Note] = {}

    def get(self, rank: int, key: str) -> str:
        """A note's value; empty if there is none."""
        return self.all.get((rank, key), (0, ""))[1]

    def find(self, kind: str, ranks: Collection[int] | None) -> dict[tuple[int, str], str]:
        """What some workers, or all, noted under keys that begin so, by worker and the rest."""
        return {
            (rank, key[len(kind) :]): value
            for (rank, key), (_, value) in self.all.items()
            if value and key.startswith(kind) and (ranks is None or rank in ranks)
        }

    def set(self, key: str, value: str) -> dict[tuple[int, str], Note]:
        """Change a note of this worker, and return it to be sent."""
        version = self.all.get((self._rank, key), (0, ""))[0] + 1
        self.all[self._rank, key] = version, value[:_MAX_VALUE]
        return {(self._rank, key): self.all[self._rank, key]}

    def merge(
        self, notes: Mapping[tuple[int, str], Note]
    ) -> tuple[dict[tuple[int, str], Note], list[str]]:
        """Take over newer notes: those to be sent on, and keys of outdated ones of this worker."""
        fresh, stale = {}, []
        for (rank, key), note in notes.items():
            mine = self.all.get((rank, key), (0, ""))[0]
            has_room = mine or sum(known[0] == rank for known in self.all) < _MAX_NOTES
            if _is_newer(note[0], mine) and has_room:
                self.all[rank, key] = note
                if rank == self._rank:
                    stale.append(key)
                else:
                    fresh[rank, key] = note
        return fresh, stale


def _is_newer(version: int, mine: int) -> bool:
    """Whether a version that arrives is newer, and not so much newer that it must be made up."""
    return mine < version <= mine + _MAX_JUMP


def _version(value: object) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{value!r} is not a version")
    return value
