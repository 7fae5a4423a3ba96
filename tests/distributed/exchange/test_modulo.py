"""The exchange over a modulo wire, on real links in memory, against the definition."""

from __future__ import annotations

import pytest
from tests.distributed import coded


@pytest.mark.parametrize("mixing", ["laplacian", "pairwise"])
@pytest.mark.parametrize("wire", ["modulo:8", "modulo:4", "modulo:3", "modulo:2"])
def test_an_exchange_is_the_definition(wire, mixing) -> None:
    coded.check_definition(wire, mixing)


def test_meetings_one_by_one_are_the_round() -> None:
    coded.check_one_by_one("modulo:3")


def test_the_state_of_an_exchange_is_all_it_remembers() -> None:
    coded.check_state("modulo:4")


def test_a_value_that_is_not_finite_is_refused_before_anything_is_sent() -> None:
    coded.check_finite("modulo:4")


def test_spare_memory_stays_within_two_buckets() -> None:
    _, mixers = coded.rounds("modulo:3", "laplacian")
    assert max(mixer.spare_bytes for mixer in mixers) <= 2 * 10_000
