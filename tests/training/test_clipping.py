from __future__ import annotations

import math

import pytest

import matcha
from matcha.errors import InputError
from matcha.strategies import Greedy
from matcha.training.clipping import allowance, kept_share, renewed_reach

RING = matcha.families.ring(6)


def test_a_poorer_plan_lets_workers_be_further_apart() -> None:
    rich, poor = (matcha.plan(RING, b, Greedy(effort="none")) for b in (0.5, 0.05))
    assert math.sqrt(2) < allowance(rich, 1.0)
    assert allowance(poor, 3.0) == pytest.approx(3 * allowance(poor, 1.0))
    staged = matcha.staged_plan(RING, {0: 0.5, 9: 0.05}, Greedy(effort="none"))
    assert allowance(staged, 1.0) == max(allowance(rich, 1.0), allowance(poor, 1.0))


def test_a_move_is_cut_to_length() -> None:
    assert kept_share(3.0, 1.5) == 0.5
    assert kept_share(1.5, 1.5) == 1.0
    assert kept_share(math.nan, 1.5) == 0.0
    assert kept_share(0.0, 0.0) == 1.0
    assert renewed_reach(1.0, 4.0) == 4.0
    assert renewed_reach(4.0, 0.0) < 4.0


@pytest.mark.parametrize("clip", [0.0, -1.0, math.nan, math.inf])
def test_a_clip_is_a_positive_number(clip) -> None:
    with pytest.raises(InputError, match="positive"):
        allowance(matcha.plan(RING, 0.5, "periodic"), clip)


def test_one_way_messages_are_no_meetings() -> None:
    plan = matcha.plan(RING, 0.5, Greedy(mixing="push", effort="none"))
    with pytest.raises(InputError, match="needs meetings"):
        allowance(plan, 1.0)
