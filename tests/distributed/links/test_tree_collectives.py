"""A call that all make together, when those who are through hang up at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from matcha.distributed.links.framing import Kind
from matcha.distributed.links.link_state import LinkVersions, Tree
from matcha.distributed.links.tree_collectives import TreeCollectives
from matcha.topology import families

PATIENCE = 60.0


@dataclass(eq=False)
class Wire:
    """A connection that keeps what is sent."""

    peer: int
    is_up: bool = True
    sent: list[tuple[Kind, bytes]] = field(default_factory=list)

    def send(self, kind: Kind, number: int, contents: Any) -> None:
        self.sent.append((kind, b"".join(bytes(part) for part in contents)))

    def will_send(self, kind: Kind, number: int) -> bool:
        return False


class Versions(LinkVersions):
    """What is known of all links; something may happen just before each look at the tree."""

    happenings: list[Callable[[], None] | None]

    @property
    def tree(self) -> Tree:
        happens = self.happenings.pop(0) if self.happenings else None
        if happens is not None:
            happens()
        return super().tree

    def quiet_tree(self) -> Tree:
        return super().tree


class Worker:
    """A worker of a ring of which all links are up, driven by the test."""

    def __init__(self, rank: int, num_workers: int) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.versions = Versions(rank, topology := families.ring(num_workers))
        self.versions.happenings = []
        self.wires = {peer: Wire(peer) for peer in topology.neighbors(rank)}
        self.versions.merge({link: 2 for link in topology.links if rank not in link})
        for peer in self.wires:
            self.versions.raise_link(peer, 1)
        live = lambda: [wire for wire in self.wires.values() if wire.is_up]  # noqa: E731
        self.collectives = TreeCollectives(
            self.changed, self.versions, live, lambda: False, tuple, lambda rank: f"worker {rank}"
        )

    def hears(self, peer: int, kind: Kind, content: bytes) -> None:
        with self.changed:
            self.collectives.on_frame(self.wires[peer], kind, 0, bytearray(content))

    def loses(self, peer: int) -> None:
        self.versions.lower_link(peer)
        self.wires[peer].is_up = False

    def call(self, own: bytes) -> bytes:
        """What this worker takes to be everybody's parts."""

        def joined(parts: dict[int, memoryview]) -> bytes:
            return own + b"".join(bytes(part) for part in parts.values())

        result = self.collectives.call(
            lambda parts: [joined(parts)], lambda parts, _: joined(parts), bytes, PATIENCE
        )
        assert result is not None
        return result


def test_a_result_returns_to_the_children_it_came_from_though_the_tree_has_changed() -> None:
    """Worker 1 hangs up when it is through; by the tree without it, 3 is 2's parent, no child."""
    worker = Worker(rank=2, num_workers=6)
    first = worker.versions.tree
    assert (first.parent, first.children) == (1, (3,))
    worker.hears(3, Kind.REDUCE, first.digest.encode() + b"c")

    def update_comes_before_the_result() -> None:
        assert [kind for kind, _ in worker.wires[1].sent] == [Kind.REDUCE]
        worker.versions.merge({(0, 1): 3})
        tree = worker.versions.quiet_tree()
        assert (tree.parent, tree.children) == (3, (1,))

    def result_and_goodbye() -> None:
        worker.hears(1, Kind.RESULT, b"1all")
        worker.loses(1)

    happenings = [None, update_comes_before_the_result, None, result_and_goodbye]
    worker.versions.happenings = happenings
    assert worker.call(b"b") == b"all"
    assert not happenings
    assert (Kind.RESULT, b"1all") in worker.wires[3].sent


def test_a_result_counts_though_its_sender_hung_up_before_this_worker_looked() -> None:
    worker = Worker(rank=2, num_workers=3)

    def result_and_goodbye() -> None:
        worker.hears(0, Kind.RESULT, b"1all")
        worker.loses(0)
        worker.loses(1)

    worker.versions.happenings = [result_and_goodbye]
    assert worker.call(b"alone") == b"all"
