"""One-peer exponential: one message out and one in, exact for powers of two."""

from __future__ import annotations

import numpy as np
import pytest

import matcha
from matcha import families
from matcha.errors import InputError


@pytest.mark.parametrize(("workers", "rounds"), [(2, 1), (8, 3), (16, 4)])
def test_a_power_of_two_has_the_mean_after_all_hops(workers, rounds):
    plan = matcha.plan(families.complete(workers), 1 / (workers - 1), "one-peer")
    product = np.eye(workers)
    for round_ in plan.rounds(0, rounds):
        product = round_.matrix(workers) @ product
    np.testing.assert_allclose(product, 1 / workers)
    assert any("exact consensus" in note for note in plan.notes)


def test_others_come_close_and_do_not_claim_to_be_exact():
    plan = matcha.plan(families.complete(6), 0.2, "one-peer")
    hops = [{(j - i) % 6 for i, j in round_.links} for round_ in plan.rounds(0, 4)]
    assert hops == [{1}, {2}, {4}, {1}]
    assert all(len(round_.links) == 6 for round_ in plan.rounds(0, 4))
    assert 0 < plan.rho < 1
    assert not any("exact" in note for note in plan.notes)


def test_a_missing_link_is_named():
    with pytest.raises(InputError, match="one-peer needs the link from worker 0 to 2"):
        matcha.plan(families.ring(8), 0.5, "one-peer")
