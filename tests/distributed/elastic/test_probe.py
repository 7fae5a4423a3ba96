from __future__ import annotations

import pytest

from matcha import families
from matcha.distributed import SlowLinks
from matcha.distributed.elastic.probe import LinkMeasure, fit, probe
from matcha.errors import InputError
from matcha.testing import run_threads


def test_every_link_is_measured_and_all_workers_hear_of_it() -> None:
    ring = families.ring(5)

    def work(transport):
        # 100 kB at 40 Mbit/s take 20 ms; a matching's links are measured at once.
        return probe(ring, SlowLinks(transport, 40), message_mb=0.1, repetitions=3)

    measures, *others = run_threads(5, work)
    assert all(other == measures for other in others)
    assert [measure.link for measure in measures] == list(ring.links)
    for measure in measures:
        assert measure.seconds >= 0.02
        assert 0 <= measure.latency <= measure.seconds
        # 200 ms a megabyte at 40 Mbit/s, and never less than the wire takes.
        if measure.seconds_per_megabyte is not None:
            assert measure.latency < 0.9 * measure.seconds
            assert measure.seconds_per_megabyte > 0
            assert measure.mbps == pytest.approx(8 / measure.seconds_per_megabyte)


def test_two_sizes_give_a_latency_and_a_pace() -> None:
    latency, pace = fit(1_000, 0.0105, 2_001_000, 1.0105)
    assert latency == pytest.approx(0.01)
    assert pace == pytest.approx(0.5)


@pytest.mark.parametrize(("small", "large"), [(1e-4, 1e-4), (2e-4, 1e-4), (9.5e-5, 1e-4)])
def test_a_difference_within_luck_is_no_speed(small: float, large: float) -> None:
    """It was once printed as 1,600,000,000 Mbit/s."""
    latency, pace = fit(8, small, 1_000_000, large)
    assert (latency, pace) == (large, None)
    measure = LinkMeasure(
        link=(0, 1), latency=latency, seconds_per_megabyte=pace, seconds=large, message_bytes=10**6
    )
    assert measure.mbps is None


def test_another_number_of_workers_is_refused() -> None:
    with pytest.raises(InputError, match="has 5 workers, but 2 were started"):
        run_threads(2, lambda transport: probe(families.ring(5), transport))
