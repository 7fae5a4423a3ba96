"""The start is a collective call: links are counted, not told of one by one; some die in it."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.distributed.elastic.test_membership import wait_until
from tests.distributed.links.linked import local_peers, run_linked, vanish

from matcha import Topology, families
from matcha.distributed import LinkTransport, Peers
from matcha.distributed.links.framing import FrameStream, Kind
from matcha.errors import ExchangeError


def test_a_start_takes_frames_in_proportion_to_links(monkeypatch) -> None:
    topology = families.complete(8)
    links, workers = len(topology.links), topology.num_workers
    sent: list[Kind] = []
    send = FrameStream.send

    def counted(stream, kind, *arguments) -> None:
        if kind not in (Kind.UP, Kind.HEARTBEAT):
            sent.append(kind)
        send(stream, kind, *arguments)

    monkeypatch.setattr(FrameStream, "send", counted)
    met = threading.Barrier(workers)
    started = time.monotonic()

    def work(transport):
        met.wait(150)
        seconds, so_far = time.monotonic() - started, len(sent)
        met.wait(150)  # whoever has counted hangs up, and that is told
        return seconds, so_far, transport.members

    for seconds, so_far, members in run_linked(topology, work):
        assert members == tuple(range(workers))
        # One part and one result per worker; and where starting takes long, once per second and
        # direction of a link, which links have come up by then, and a question for the result.
        assert so_far <= 2 * workers + 4 * links * int(seconds)


class Beginner(LinkTransport):
    """A worker in the midst of its start, which may die there."""

    def __init__(self, topology: Topology, rank: int, peers: Peers) -> None:
        super().__init__(topology, rank, peers, timeout=90.0)

    def _wait_for_all(self, timeout: float) -> None:
        """Not yet."""

    def start(self) -> None:
        super()._wait_for_all(150)

    def meets_now(self, other: Beginner) -> bool:
        """Whether the link is up at both ends."""
        return other.rank in self._live() and self.rank in other._live()

    def _live(self) -> list[int]:
        with self.lock:
            return [connection.peer for connection in self.live_connections()]


def test_those_who_are_left_start_without_one_that_counted_for_others() -> None:
    """In a ring of four, worker 1 would have told 0 that 2 is ready."""
    topology, peers = families.ring(4), local_peers(4)
    zero, mortal, two = (Beginner(topology, rank, peers) for rank in range(3))
    wait_until(lambda: mortal.meets_now(zero) and mortal.meets_now(two))
    vanish(mortal)
    assert met([zero, two, Beginner(topology, 3, peers)]) == {(0, 2, 3)}


def test_a_new_process_in_the_place_of_one_that_died_is_told_who_is_ready() -> None:
    topology, peers = families.path(3), local_peers(3)
    mortal, one = (Beginner(topology, rank, peers) for rank in range(2))
    wait_until(lambda: one.meets_now(mortal))
    vanish(mortal)
    assert met([one, *(Beginner(topology, rank, peers) for rank in (0, 2))]) == {(0, 1, 2)}


def test_a_worker_that_dies_in_the_call_itself_is_replaced() -> None:
    """Worker 1 waits for its part of the first call when 0, the root, dies and another comes."""
    topology, peers = families.path(3), local_peers(3)
    mortal, one, two = (Beginner(topology, rank, peers) for rank in range(3))
    wait_until(lambda: one.meets_now(mortal) and one.meets_now(two))
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(worker.start) for worker in (one, two)]
        wait_until(lambda: one.collectives._parts.get(2))  # 2's part has come
        vanish(mortal)
        reborn = Beginner(topology, 0, peers)
        calls.append(pool.submit(reborn.start))
        for call in calls:
            call.result(150)
    wait_until(lambda: one.members == two.members == (0, 1, 2))
    for worker in (reborn, one, two):
        worker.close()


def test_a_worker_that_is_missing_is_named_also_far_away() -> None:
    topology, peers = families.path(3), local_peers(3)
    errors: dict[int, str] = {}

    def body(rank: int) -> None:
        with pytest.raises(ExchangeError) as caught:
            LinkTransport(topology, rank, peers, start_timeout=2.0 + 4.0 * rank)
        errors[rank] = str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(body, (0, 1)))
    assert "rank 2 did not come within 2 s" in errors[0]
    assert "rank 2 did not come within 6 s" in errors[1]


def met(beginners: list[Beginner]) -> set[tuple[int, ...]]:
    """Whom workers see around them once they have all started."""
    with ThreadPoolExecutor(len(beginners)) as pool:
        list(pool.map(lambda beginner: beginner.start(), beginners))
    wait_until(lambda: all(len(each.members) == len(beginners) for each in beginners))
    seen = {beginner.members for beginner in beginners}
    for beginner in beginners:
        beginner.close()
    return seen
