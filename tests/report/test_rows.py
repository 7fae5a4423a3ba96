from __future__ import annotations

import pytest
from tests.report.runs import run_of

from matcha.report.summary import compare


def test_a_run_that_misses_the_target_has_no_time_and_no_speedup(tmp_path):
    vanilla = run_of([4, 1, 1], strategy="vanilla", tmp_path=tmp_path)
    lazy = run_of([4, 3, 3], tmp_path=tmp_path)
    row = compare([vanilla, lazy], target=2).rows[1]
    assert row.time_to_target is None
    assert row.speedup is None
    assert row.comm_units == 4


def test_seeds_become_one_row_with_their_deviation(tmp_path):
    losses = ([4, 2, 2], [4, 1, 1], [4, 3, 3])
    runs = [
        run_of(values, seed=seed, tmp_path=tmp_path, config={"choices": {"seed": seed}})
        for seed, values in enumerate(losses)
    ]
    comparison = compare(runs, target=3.5)
    (row,) = comparison.rows
    assert row.seeds == 3
    assert row.train_loss == 2
    assert row.deviations["train_loss"] == pytest.approx(1)
    assert row.time_to_target == pytest.approx((0.25 + 1 / 6 + 0.5) / 3)
    assert len(comparison.groups[0].runs) == 3
