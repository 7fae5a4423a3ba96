from __future__ import annotations

from types import SimpleNamespace

import torch

from matcha import Round
from matcha.distributed.exchange.codecs import FloatCodec
from matcha.distributed.exchange.exchange import Exchange, Stopwatch
from matcha.distributed.exchange.hooks import LinkTimer, LinkTimes
from matcha.distributed.exchange.meeting import Meeting, meetings
from matcha.testing import run_threads


def test_the_median_of_late_meetings_counts() -> None:
    times = LinkTimes()
    for seconds in (*[9.0] * 5, *[1.0] * 7, 50.0):
        times.add(3, seconds, waited=1.0)
    times.add(5, 0.25, waited=0.0)  # who comes second sees less, but there is nothing else
    assert times.take() == {3: 1.0, 5: 0.25}
    assert times.take() == {}


def test_waiting_is_no_part_of_it(monkeypatch) -> None:
    """Each meeting waits for 3 s and exchanges for 2, by a clock of its own."""
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    exchange, times = SimpleNamespace(wait_seconds=0.0), LinkTimes()
    timer = LinkTimer(exchange, times)
    for position, peer in enumerate((1, 2)):
        meeting = Meeting(position, peer, 0.5)
        assert timer.before(meeting, 4)
        exchange.wait_seconds += 3.0
        clock[0] += 5.0
        timer.after(meeting)
    assert times.take() == {1: 2.0, 2: 2.0}


def test_every_meeting_of_a_round_is_timed() -> None:
    round = Round(matchings=(((0, 1),), ((0, 2),)), indices=(0, 1), mixing="laplacian", weight=0.3)

    def work(transport):
        exchange = Exchange(transport, [FloatCodec([torch.ones(1)], bucket_bytes=64)], timeout=150)
        times = LinkTimes()
        exchange.hooks.append(LinkTimer(exchange, times))
        exchange.run(round, meetings(round, transport.rank), 4)
        return times.take().keys()

    assert run_threads(3, work) == [{1, 2}, {0}, {0}]


def test_waiting_and_exchanging_are_told_apart():
    spans = []
    watch = Stopwatch(3, spans.append)
    exchange = SimpleNamespace(wait_seconds=5.0)
    watch.end_computing(7)
    with watch.exchanging(exchange, 7):
        exchange.wait_seconds += 0.0
    assert [span.kind for span in spans] == ["compute", "wait", "exchange"]
    assert {(span.worker, span.iteration) for span in spans} == {(3, 7)}
    compute, wait, exchanging = spans
    assert compute.start <= compute.end <= wait.start == wait.end == exchanging.start
    assert watch.exchange_seconds == exchanging.end - wait.start


def test_exchanges_are_counted_where_nobody_listens():
    watch = Stopwatch(0, None)
    watch.end_computing(0)
    with watch.exchanging(SimpleNamespace(wait_seconds=0.0), 0):
        pass
    assert watch.exchange_seconds > 0
