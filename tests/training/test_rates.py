from __future__ import annotations

import pytest

from matcha.errors import InputError
from matcha.simulation import Constant, Plateau, StepDecay


def test_warm_up_is_linear_and_then_over():
    schedule = Constant(base=1.0, warmup=5, start=0.5)
    assert [schedule.rate(epoch) for epoch in (0, 2.5, 5, 9)] == [0.5, 0.75, 1.0, 1.0]


def test_steps_after_warm_up():
    schedule = StepDecay(base=0.8, milestones=(100, 150), warmup=5, start=0.1)
    assert schedule.rate(0) == pytest.approx(0.1)
    assert schedule.rate(50) == pytest.approx(0.8)
    assert schedule.rate(120) == pytest.approx(0.08)
    assert schedule.rate(199) == pytest.approx(0.008)


def test_plateau_counts_every_evaluation_without_a_gain():
    schedule = Plateau(base=40.0, factor=4)
    assert schedule.rate(0) == 40.0
    assert schedule.rate(3, losses=(5.0, 4.0, 3.0)) == 40.0
    assert schedule.rate(5, losses=(5.0, 4.0, 4.5, 4.2, 3.9)) == 2.5


@pytest.mark.parametrize(
    "make",
    [
        lambda: Constant(base=0.0),
        lambda: StepDecay(base=1.0, factor=0.0),
        lambda: Plateau(base=1.0, warmup=-1),
        lambda: Plateau(base=1.0, factor=-2),
    ],
)
def test_nonsense_is_refused(make):
    with pytest.raises(InputError):
        make()
