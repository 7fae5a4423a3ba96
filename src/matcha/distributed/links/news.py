"""News: what a worker tells its neighbours, which tell on what is new to them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from matcha.topology import Link

__all__ = ["News", "Note"]

K = TypeVar("K")
V = TypeVar("V")

Note = tuple[int, str]
"""A version that grows, and what a worker says about itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What is new; of each thing the latest alone counts, so news that waits can be put together.

    >>> first = News(links={(0, 1): 3, (1, 2): 2})
    >>> both = first | News(links={(0, 1): 4}, ready=True)
    >>> both.links, both.ready
    ({(0, 1): 4, (1, 2): 2}, True)
    >>> both.without(first).links
    {(0, 1): 4}
    >>> News.decode(both.encode()) == both
    True
    >>> bool(News())
    False
    """

    links: Mapping[Link, int] = field(default_factory=dict)
    """Versions of links, as in the table."""
    accused: Mapping[int, int] = field(default_factory=dict)
    """Whom workers waited for in vain."""
    notes: Mapping[tuple[int, str], Note] = field(default_factory=dict)
    """What workers said about themselves, by worker and subject."""
    ready: bool = False
    """All links of the sender, and of those it counts for, have been up (see the muster)."""
    complete: bool = False
    """All links there are have been up."""

    def __bool__(self) -> bool:
        return bool(self.links or self.accused or self.notes or self.ready or self.complete)

    def __or__(self, newer: News) -> News:
        return News(
            links={**self.links, **newer.links},
            accused={**self.accused, **newer.accused},
            notes={**self.notes, **newer.notes},
            ready=self.ready or newer.ready,
            complete=self.complete or newer.complete,
        )

    def without(self, known: News) -> News:
        """What is left of it for one who knows something."""
        return News(
            links=_but(self.links, known.links),
            accused=_but(self.accused, known.accused),
            notes=_but(self.notes, known.notes),
            ready=self.ready,
            complete=self.complete and not known.complete,
        )

    def encode(self) -> bytes:
        """As bytes for a frame."""
        facts = {
            "links": [[*link, version] for link, version in self.links.items()],
            "accused": [[rank, peer] for rank, peer in self.accused.items()],
            "notes": [[*key, *note] for key, note in self.notes.items()],
            "ready": self.ready,
            "complete": self.complete,
        }
        return json.dumps({name: value for name, value in facts.items() if value}).encode()

    @classmethod
    def decode(cls, content: bytes | bytearray) -> News:
        """Of a frame's bytes; raises what nonsense makes Python raise."""
        facts: dict[str, Any] = json.loads(content)
        return cls(
            links={(i, j): version for i, j, version in facts.get("links", ())},
            accused=dict(facts.get("accused", ())),
            notes={(rank, what): (n, value) for rank, what, n, value in facts.get("notes", ())},
            ready=bool(facts.get("ready")),
            complete=bool(facts.get("complete")),
        )


def _but(news: Mapping[K, V], known: Mapping[K, V]) -> dict[K, V]:
    return {key: value for key, value in news.items() if known.get(key) != value}
