from __future__ import annotations

from types import SimpleNamespace

from matcha.distributed.stopwatch import Stopwatch


def test_waiting_and_exchanging_are_told_apart():
    spans = []
    watch = Stopwatch(3, spans.append)
    exchange = SimpleNamespace(wait_seconds=5.0)
    watch.computed(7)
    with watch.exchanging(exchange, 7):
        exchange.wait_seconds += 0.0
    assert [span.kind for span in spans] == ["compute", "wait", "exchange"]
    assert {(span.worker, span.iteration) for span in spans} == {(3, 7)}
    compute, wait, exchanging = spans
    assert compute.start <= compute.end <= wait.start == wait.end == exchanging.start
    assert watch.exchange_seconds == exchanging.end - wait.start


def test_exchanges_are_counted_where_nobody_listens():
    watch = Stopwatch(0, None)
    assert not watch.listens
    with watch.exchanging(SimpleNamespace(wait_seconds=0.0), 0):
        pass
    assert watch.exchange_seconds > 0
