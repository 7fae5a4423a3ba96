from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from matcha.records import Record
from matcha.report.series import curves, short, thin


@given(st.integers(3, 400), st.integers(3, 60), st.integers(0, 9))
def test_thinning_keeps_the_ends_the_order_and_the_limit(count, limit, seed):
    y = np.random.default_rng(seed).normal(size=count)
    kept = thin(range(count), y, limit)
    assert len(kept) == min(count, limit)
    assert kept[0] == 0
    assert kept[-1] == count - 1
    assert (np.diff(kept) > 0).all()


def test_thinning_keeps_the_extremes_of_a_wave():
    x = np.arange(5_000)
    y = np.sin(x / 200)
    kept = thin(x, y, 200)
    assert y[kept].max() == pytest.approx(1, abs=1e-3)
    assert y[kept].min() == pytest.approx(-1, abs=1e-3)


def test_curves_hold_every_axis_and_leave_out_what_was_never_recorded():
    records = [
        Record(
            iteration=k,
            epoch=k / 10,
            train_loss=1 / (1 + k),
            time=0.5 * k,
            comm_units=2.0 * k,
            megabytes_sent=3.0 * k,
        )
        for k in range(1_000)
    ]
    found = curves(records, limit=50)
    assert set(found) == {"train_loss"}
    curve = found["train_loss"]
    assert {len(column) for column in curve.values()} == {50}
    assert curve["time"][-1] == 499.5
    assert curve["comm_units"][-1] == 1998
    assert curve["megabytes_sent"][-1] == 2997


def test_a_diverged_curve_ends_at_its_last_finite_value():
    losses = [2.0, 5.0, float("inf"), float("nan")]
    records = [Record(iteration=k, epoch=float(k), train_loss=v) for k, v in enumerate(losses)]
    assert curves(records)["train_loss"]["y"] == [2, 5]


def test_short_numbers_survive_extremes():
    assert short(1e-30) == 1e-30
    assert short(float("-inf")) is None
    assert short(None) is None
    assert short(1e20) == 1e20
