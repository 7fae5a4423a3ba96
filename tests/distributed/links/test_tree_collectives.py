"""A call that all make together, when those who are through hang up at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from matcha.distributed.links.framing import Kind
from matcha.distributed.links.table import LinkTable
from matcha.distributed.links.tree_collectives import Council
from matcha.topology import families

PATIENCE = 60.0


@dataclass
class Wire:
    """A link that keeps what is sent."""

    peer: int
    is_up: bool = True
    sent: list[tuple[Kind, bytes]] = field(default_factory=list)

    def send(self, kind: Kind, number: int, contents: Any) -> None:
        self.sent.append((kind, b"".join(bytes(part) for part in contents)))


class Chair:
    """A worker of a ring of which all links are up, driven by the test."""

    def __init__(self, rank: int, num_workers: int) -> None:
        self.rank = rank
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.known = LinkTable(rank, topology := families.ring(num_workers))
        self.wires = {peer: Wire(peer) for peer in topology.neighbors(rank)}
        self.happenings: list[Callable[[], None] | None] = []
        self.known.merge({link: 2 for link in topology.links if rank not in link})
        for peer in self.wires:
            self.known.raise_link(peer, 1)

    @property
    def table(self) -> LinkTable:
        """What is known of all links; something may happen just before each look at it."""
        happens = self.happenings.pop(0) if self.happenings else None
        if happens is not None:
            happens()
        return self.known

    def live_links(self) -> list[Wire]:
        return [wire for wire in self.wires.values() if wire.is_up]

    def anyone_is_away(self) -> bool:
        return False

    def name(self, rank: int) -> str:
        return f"worker {rank}"

    def loses(self, peer: int) -> None:
        self.known.lower_link(peer)
        self.wires[peer].is_up = False


def call(council: Council, own: bytes) -> bytes:
    """What this worker takes to be everybody's parts."""

    def joined(parts: dict[int, memoryview]) -> bytes:
        return own + b"".join(bytes(part) for part in parts.values())

    return bytes(
        council.call(lambda parts: [joined(parts)], lambda parts, _: joined(parts), PATIENCE)
    )


def test_a_result_falls_to_the_children_it_rose_from_though_the_tree_has_changed() -> None:
    """Worker 1 hangs up when it is through; by the tree without it, 3 is 2's parent, no child."""
    chair = Chair(rank=2, num_workers=6)
    council = Council(chair)
    first = chair.known.tree
    assert (first.parent, first.children) == (1, (3,))
    with chair.lock:
        council.heard(chair.wires[3], Kind.RISE, 0, bytearray(first.digest.encode() + b"c"))

    def news_comes_before_the_result() -> None:
        assert [kind for kind, _ in chair.wires[1].sent] == [Kind.RISE]
        chair.known.merge({(0, 1): 3})
        assert (chair.known.tree.parent, chair.known.tree.children) == (3, (1,))

    def result_and_goodbye() -> None:
        council.heard(chair.wires[1], Kind.FOUND, 0, bytearray(b"1all"))
        chair.loses(1)

    chair.happenings = [None, news_comes_before_the_result, None, result_and_goodbye]
    assert call(council, b"b") == b"all"
    assert not chair.happenings
    assert (Kind.FOUND, b"1all") in chair.wires[3].sent


def test_a_result_counts_though_its_sender_hung_up_before_this_worker_looked() -> None:
    chair = Chair(rank=2, num_workers=3)
    council = Council(chair)

    def result_and_goodbye() -> None:
        council.heard(chair.wires[0], Kind.FOUND, 0, bytearray(b"1all"))
        chair.loses(0)
        chair.loses(1)

    chair.happenings = [result_and_goodbye]
    assert call(council, b"alone") == b"all"
