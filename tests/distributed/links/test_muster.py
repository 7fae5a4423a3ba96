"""At the start links are counted, not told of one by one; also when somebody dies before it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tests.distributed.links.linked import local_peers, run_linked

from matcha import Topology, families
from matcha.distributed import Peers
from matcha.distributed.links.framing import Channel, Kind
from matcha.distributed.links.neighborhood import Neighborhood


def test_a_start_takes_news_in_proportion_to_links(monkeypatch) -> None:
    topology = families.complete(8)
    links, workers = len(topology.links), topology.num_workers
    sent: list[float] = []
    send = Channel.send

    def counted(channel, kind, *arguments) -> None:
        if kind is Kind.NEWS:
            sent.append(time.monotonic())
        send(channel, kind, *arguments)

    monkeypatch.setattr(Channel, "send", counted)
    met = threading.Barrier(workers)
    started = time.monotonic()

    def work(transport):
        met.wait(150)
        seconds, so_far = time.monotonic() - started, len(sent)
        met.wait(150)  # whoever has counted hangs up, and that is news
        return seconds, so_far, transport.members

    for seconds, so_far, members in run_linked(topology, work):
        assert members == tuple(range(workers))
        # One "ready" a worker, one "all have been up" each way of a link; and where starting takes
        # long, once a second and way, which links have come up by then.
        assert so_far <= workers + 2 * links * (1 + int(seconds))


class Beginner:
    """A worker in the midst of its start, which may die there."""

    def __init__(self, topology: Topology, rank: int, peers: Peers) -> None:
        self.near = Neighborhood(topology, rank, peers, None, 90.0, str)

    def meets(self, other: Beginner) -> bool:
        """Whether the link is up at both ends."""
        return other.near.rank in self._live() and self.near.rank in other._live()

    def _live(self) -> list[int]:
        with self.near.lock:
            return [link.peer for link in self.near.live_links()]

    def members(self) -> tuple[int, ...]:
        with self.near.lock:
            return self.near.table.members

    def die(self) -> None:
        with self.near.lock:
            self.near.is_open = False
            self.near.drop_all("died")
        if self.near.door is not None:
            self.near.door.close()


def test_those_who_are_left_start_without_one_that_counted_for_others() -> None:
    """In a ring of four, worker 1 would have told 0 that 2 is ready."""
    topology, peers = families.ring(4), local_peers(4)
    zero, mortal, two = (Beginner(topology, rank, peers) for rank in range(3))
    wait_until(lambda: mortal.meets(zero) and mortal.meets(two))
    mortal.die()
    assert met([zero, two, Beginner(topology, 3, peers)]) == {(0, 2, 3)}


def test_a_new_process_in_the_place_of_one_that_died_is_told_who_is_ready() -> None:
    topology, peers = families.path(3), local_peers(3)
    mortal, one = (Beginner(topology, rank, peers) for rank in range(2))
    wait_until(lambda: one.meets(mortal))
    mortal.die()
    assert met([one, *(Beginner(topology, rank, peers) for rank in (0, 2))]) == {(0, 1, 2)}


def met(beginners: list[Beginner]) -> set[tuple[int, ...]]:
    """Whom workers see around them once they have all started."""
    with ThreadPoolExecutor(len(beginners)) as pool:
        list(pool.map(lambda beginner: beginner.near.wait_for_all(150), beginners))
    wait_until(lambda: all(len(each.members()) == len(beginners) for each in beginners))
    seen = {beginner.members() for beginner in beginners}
    for beginner in beginners:
        beginner.near.close()
    return seen


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 150
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.01)
