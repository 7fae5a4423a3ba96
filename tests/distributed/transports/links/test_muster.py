"""At the start links are counted, not told of one by one; also when somebody dies before it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tests.distributed.transports.links.linked import local_peers, run_linked

from matcha import Topology, families
from matcha.distributed import LinkTransport, Peers
from matcha.distributed.transports.links.channel import Channel, Kind
from matcha.distributed.transports.links.neighborhood import Neighborhood


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

    def meets(self, *peers: int) -> bool:
        with self.near.lock:
            return set(peers) <= {link.peer for link in self.near.live_links()}

    def die(self) -> None:
        with self.near.lock:
            self.near.is_open = False
            self.near.drop_all("died")
        if self.near.door is not None:
            self.near.door.close()


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 150
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.01)


def test_those_who_are_left_start_without_one_that_counted_for_others() -> None:
    """In a ring of four, worker 1 would have told 0 that 2 is ready."""
    topology, peers = families.ring(4), local_peers(4)
    mortal = Beginner(topology, 1, peers)

    def late() -> bool:
        wait_until(lambda: mortal.meets(0, 2))
        mortal.die()
        return True

    assert start_all(topology, peers, {0: None, 2: None, 3: late}) == {(0, 2, 3)}


def test_a_new_process_in_the_place_of_one_that_died_is_told_who_is_ready() -> None:
    topology, peers = families.path(3), local_peers(3)
    mortal = Beginner(topology, 0, peers)

    def reborn() -> bool:
        wait_until(lambda: mortal.meets(1))
        mortal.die()
        return True

    assert start_all(topology, peers, {0: reborn, 1: None, 2: None}) == {(0, 1, 2)}


def start_all(
    topology: Topology, peers: Peers, before: dict[int, Callable[[], bool] | None]
) -> set[tuple[int, ...]]:
    """Start workers, some of them after something; returns whom they meet at last."""
    met = threading.Barrier(len(before))
    found: dict[int, tuple[int, ...]] = {}

    def body(rank: int, first: Callable[[], bool] | None) -> None:
        if first is not None:
            assert first()
        transport = LinkTransport(topology, rank, peers, silence=90.0, timeout=150.0)
        try:
            wait_until(lambda: len(transport.members) == len(before))
            found[rank] = transport.members
            met.wait(150)
        finally:
            transport.close()

    threads = [threading.Thread(target=body, args=item) for item in before.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found.keys() == before.keys()
    return set(found.values())
