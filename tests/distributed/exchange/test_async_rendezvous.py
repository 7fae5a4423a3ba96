from __future__ import annotations

import random
import threading
import time

import pytest
from tests.distributed.asynchronous import meet_all

from matcha.distributed.exchange.background import Rendezvous
from matcha.distributed.transports.collectives import barrier
from matcha.errors import ExchangeError
from matcha.testing import run_threads
from matcha.topology import families

PATIENCE = 150.0


class Diary:
    """Which meetings each pair held, as either end saw them."""

    def __init__(self):
        self.lock = threading.Lock()
        self.held = {}

    def hold_of(self, rank, random):
        def hold(peer, weight, number):
            time.sleep(random.random() * 1e-3)
            with self.lock:
                self.held.setdefault((rank, peer), []).append((number, weight))

        return hold

    def check(self):
        for (i, j), meetings in self.held.items():
            assert meetings == self.held[j, i]
            assert [number for number, _ in meetings] == list(range(len(meetings)))


@pytest.mark.parametrize("seed", range(12))
def test_nobody_waits_for_ever_and_both_ends_hold_the_same_meetings(seed):
    """Workers of any speed that want random neighbours at random times, and leave at random."""
    topology = families.complete(5) if seed % 2 else families.paper("er8")
    diary = Diary()

    def work(transport):
        rng = random.Random(100 * seed + transport.rank)
        neighbors = topology.neighbors(transport.rank)
        hold = diary.hold_of(transport.rank, random.Random(seed))
        rendezvous = Rendezvous(transport, neighbors, hold, PATIENCE)
        rendezvous.want(dict.fromkeys(neighbors, 0.5))
        meet_all(rendezvous)  # all have come: on a loaded machine some left before others
        pace = rng.choice([0.0, 1e-3, 3e-3])
        for k in range(rng.randrange(20, 60)):
            wanted = rng.sample(neighbors, rng.randrange(len(neighbors) + 1))
            rendezvous.want(dict.fromkeys(wanted, 0.5 + 0.01 * (k % 3)))
            time.sleep(pace * rng.random())
        rendezvous.leave()
        return rendezvous.held

    held = run_threads(topology.num_workers, work)
    diary.check()
    assert sum(held) == sum(map(len, diary.held.values()))
    assert min(held) >= min(topology.degrees)


def test_who_does_not_want_is_not_met_and_holds_up_nobody():
    def work(transport):
        met = []
        rendezvous = Rendezvous(transport, [1 - transport.rank], lambda *m: met.append(m), PATIENCE)
        if transport.rank == 0:
            rendezvous.want({1: 0.5})
        barrier(transport, PATIENCE)
        open_then = rendezvous.is_open
        barrier(transport, PATIENCE)
        rendezvous.leave()
        return open_then, met

    assert run_threads(2, work) == [(True, []), (False, [])]


def test_who_has_left_is_waited_for_no_longer():
    """At once: the goodbye wakes who waits, long before the timeout."""

    def work(transport):
        rendezvous = Rendezvous(transport, [1 - transport.rank], lambda *_: None, 1e6)
        if transport.rank == 0:
            rendezvous.want({1: 0.5})
            meet_all(rendezvous)
        rendezvous.leave()
        return rendezvous.held

    assert run_threads(2, work) == [0, 0]


def test_a_wish_that_comes_again_is_one_wish_and_both_ends_mean_the_same_weight():
    def work(transport):
        met = []
        rendezvous = Rendezvous(transport, [1 - transport.rank], lambda *m: met.append(m), PATIENCE)
        if transport.rank == 0:
            for _ in range(5):
                rendezvous.want({1: 0.5})
        barrier(transport, PATIENCE)
        if transport.rank == 1:
            rendezvous.want({0: 0.25})
        meet_all(rendezvous)
        rendezvous.leave()
        return met

    assert run_threads(2, work) == [[(1, 0.375, 0)], [(0, 0.375, 0)]]


@pytest.mark.parametrize("seed", range(4))
def test_what_was_wanted_before_a_pause_is_forgotten_at_both_ends(seed):
    topology = families.paper("er8")
    diary = Diary()

    def work(transport):
        rng = random.Random(seed + transport.rank)
        neighbors = topology.neighbors(transport.rank)
        hold = diary.hold_of(transport.rank, rng)
        rendezvous = Rendezvous(transport, neighbors, hold, PATIENCE)
        for _ in range(6):
            rendezvous.want({p: 0.5 for p in neighbors if rng.random() < 0.5})
            rendezvous.pause()
            barrier(transport, PATIENCE)
            rendezvous.reset()
            assert not rendezvous.is_open
            barrier(transport, PATIENCE)
            if transport.rank == 0:  # nobody may begin one while others still look
                diary.check()
            barrier(transport, PATIENCE)
        rendezvous.want(dict.fromkeys(neighbors, 0.5))
        meet_all(rendezvous)
        rendezvous.leave()
        return rendezvous.held

    held = run_threads(8, work)
    diary.check()
    assert min(held) >= 1


def test_what_fails_on_the_thread_is_raised_where_the_script_looks():
    def work(transport):
        def hold(peer, weight, number):
            raise ExchangeError("rank 7 is gone.")

        rendezvous = Rendezvous(transport, [1 - transport.rank], hold, PATIENCE)
        rendezvous.want({1 - transport.rank: 0.5})
        with pytest.raises(ExchangeError, match="rank 7 is gone"):
            meet_all(rendezvous)
        with pytest.raises(ExchangeError, match="rank 7 is gone"):
            rendezvous.check()
        return transport.failed

    assert run_threads(2, work) == [True, True]


def test_who_never_says_goodbye_is_named():
    def work(transport):
        if transport.rank == 1:
            return
        rendezvous = Rendezvous(transport, [1], lambda *_: None, 0.3)
        with pytest.raises(ExchangeError, match="no goodbye from rank 1"):
            rendezvous.leave()
        rendezvous.stop()

    run_threads(2, work)
