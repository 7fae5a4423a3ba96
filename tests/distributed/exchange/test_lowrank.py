"""The exchange over a low-rank wire, on real links in memory, against the definition."""

from __future__ import annotations

import pytest
from tests.distributed import coded


@pytest.mark.parametrize("mixing", ["laplacian", "pairwise"])
def test_an_exchange_is_the_definition(mixing) -> None:
    coded.check_definition("lowrank:2", mixing)


def test_meetings_one_by_one_are_the_round() -> None:
    coded.check_one_by_one("lowrank:2")


def test_the_state_of_an_exchange_is_all_it_remembers() -> None:
    coded.check_state("lowrank:2")


def test_a_value_that_is_not_finite_is_refused_before_anything_is_sent() -> None:
    coded.check_finite("lowrank:2")
