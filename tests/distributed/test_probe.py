from __future__ import annotations

import pytest

from matcha import families
from matcha.distributed import SlowLinks, run_threads
from matcha.distributed.probe import probe
from matcha.errors import InputError


def test_every_link_is_measured_and_all_workers_hear_of_it() -> None:
    ring = families.ring(5)

    def work(transport):
        # 100 kB at 40 Mbit/s take 20 ms; a matching's links are measured at once.
        return probe(ring, SlowLinks(transport, 40), message_bytes=100_000, repetitions=3)

    measures, *others = run_threads(5, work)
    assert all(other == measures for other in others)
    assert [measure.link for measure in measures] == list(ring.links)
    for measure in measures:
        assert measure.seconds >= 0.02 > measure.latency
        assert 0 < measure.mbps <= 42


def test_another_number_of_workers_is_refused() -> None:
    with pytest.raises(InputError, match="has 5 workers, but 2 were started"):
        run_threads(2, lambda transport: probe(families.ring(5), transport))
