from __future__ import annotations

import math

import matcha
from matcha.strategies import COMPARED, is_control


def test_nobody_ever_talks():
    plan = matcha.plan(matcha.families.ring(5), 0.5, "silent")
    assert not any(plan.rounds(0, 100))
    assert plan.expected_comm_time == 0
    assert plan.rho == 1
    assert math.isinf(plan.consensus_error)
    assert plan.budget == 0


def test_it_is_compared_and_can_win_nothing():
    assert {"silent", "allreduce", "local"} <= set(COMPARED)
    assert [name for name in COMPARED if is_control(name)] == ["silent"]
