from __future__ import annotations

import torch

from matcha import Round
from matcha.distributed.exchange.exchange import meetings
from matcha.distributed.exchange.link_times import LinkTimes, Timed


def test_the_median_of_late_meetings_counts() -> None:
    times = LinkTimes()
    for seconds in (*[9.0] * 5, *[1.0] * 7, 50.0):
        times.add(3, seconds, waited=1.0)
    times.add(5, 0.25, waited=0.0)  # who comes second sees less, but there is nothing else
    assert times.take() == {3: 1.0, 5: 0.25}
    assert times.take() == {}


class Slow:
    """A runner whose clock is its own: it waits for 3 s and exchanges for 2."""

    timeout = 10.0
    wait_seconds = 0.0

    def __init__(self, clock) -> None:
        self.clock = clock
        self.runs = []

    def run(self, round, met, iteration) -> None:
        self.runs.append([meeting.peer for meeting in met])
        self.wait_seconds += 3.0
        self.clock[0] += 5.0


def test_waiting_is_no_part_of_it(monkeypatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    runner, times = Slow(clock), LinkTimes()
    round = Round(matchings=(((0, 1),), ((0, 2),)), indices=(0, 1), mixing="pairwise", weight=0.5)
    timed = Timed(runner, [torch.ones(1)], times)
    timed.run(round, meetings(round, 0), 4)
    assert runner.runs == [[1], [2]]
    assert times.take() == {1: 2.0, 2: 2.0}
    timed.timeout = 7.0
    assert (timed.timeout, timed.wait_seconds) == (7.0, 6.0)
