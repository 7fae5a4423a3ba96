from __future__ import annotations

import pytest

from matcha.records import arrival, lowest_held


def test_two_evaluations_in_a_row_are_an_arrival():
    assert arrival([2.0, 0.9, 1.1, 0.8, 0.8], 1.0) == (3, pytest.approx(1 / 3))
    assert arrival([0.5, 0.4], 1.0) == (0, 1.0)
    assert arrival([2.0, 0.5], 1.0) is None
    assert arrival([], 1.0) is None


def test_the_lowest_that_was_held_is_reached_and_nothing_lower():
    losses = [3.0, 1.0, 2.0, 1.5, 1.8]
    held = lowest_held(losses)
    assert held == 1.8
    assert arrival(losses, held) is not None
    assert arrival(losses, held - 1e-9) is None
    assert lowest_held([1.0]) is None
