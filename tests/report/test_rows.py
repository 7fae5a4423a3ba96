from __future__ import annotations

import pytest
from tests.report.runs import run_of

from matcha.report import compare


def test_a_run_that_misses_the_target_has_no_time_and_no_speedup(tmp_path):
    vanilla = run_of([4, 1, 1], strategy="vanilla", tmp_path=tmp_path)
    lazy = run_of([4, 3, 3], tmp_path=tmp_path)
    row = compare([vanilla, lazy], target_loss=2).rows[1]
    assert row.time_to_target is None
    assert row.speedup is None
    assert row.comm_units == 4


def test_a_factor_is_a_verdict_too(tmp_path):
    """None for who is less accurate or was silent: doing nothing would win the column."""
    vanilla = run_of(
        [4, 3, 1, 1], strategy="vanilla", test_accuracy=0.9, test_accuracy_error=0.01,
        seconds=3, tmp_path=tmp_path,
    )  # fmt: skip
    quick = {"losses": [4, 1, 1, 1], "test_accuracy_error": 0.01, "tmp_path": tmp_path}
    worse = run_of(strategy="periodic", test_accuracy=0.5, **quick)
    equal = run_of(strategy="greedy", test_accuracy=0.89, **quick)
    silent = run_of(strategy="silent", test_accuracy=0.9, **quick)
    rows = compare([vanilla, worse, equal, silent], target_loss=2).rows
    assert [row.speedup for row in rows] == [1, None, pytest.approx(6.75), None]


def test_seeds_become_one_row_with_their_deviation(tmp_path):
    losses = ([4, 2, 2], [4, 1, 1], [4, 3, 3])
    runs = [
        run_of(values, seed=seed, tmp_path=tmp_path, config={"choices": {"seed": seed}})
        for seed, values in enumerate(losses)
    ]
    comparison = compare(runs, target_loss=3.5)
    (row,) = comparison.rows
    assert row.seeds == 3
    assert row.train_loss == 2
    assert row.deviations["train_loss"] == pytest.approx(1)
    assert row.time_to_target == pytest.approx((0.25 + 1 / 6 + 0.5) / 3)
    assert len(comparison.groups[0]) == 3


def seeded(times, strategy, tmp_path, **fields):
    """Runs that differ in their seed and in how long an epoch takes."""
    return [
        run_of(
            [4, 1, 1], strategy=strategy, seconds=seconds, seed=seed, tmp_path=tmp_path,
            config={"choices": {"seed": seed}}, **fields,
        )
        for seed, seconds in enumerate(times)
    ]  # fmt: skip


def test_no_factor_within_the_spread(tmp_path):
    vanilla = seeded([1.0, 1.2, 1.4], "vanilla", tmp_path)
    close, far = seeded([0.9, 1.1, 1.3], "matcha", tmp_path), seeded([0.1] * 3, "greedy", tmp_path)
    rows = compare([*vanilla, *close, *far], target_loss=2).rows
    assert [row.speedup for row in rows] == [1, None, pytest.approx(12)]


def test_json_says_who_is_not_ranked_and_why(tmp_path):
    vanilla = run_of(
        [4, 1, 1], strategy="vanilla", test_accuracy=0.9, test_accuracy_error=0.01, seconds=3,
        tmp_path=tmp_path,
    )  # fmt: skip
    local = run_of(
        [4, 1, 1], strategy="local", test_accuracy=0.8, test_accuracy_error=0.01, tmp_path=tmp_path
    )
    document = compare([vanilla, local], target_loss=2).to_json()
    assert [row["unranked"] for row in document["rows"]] == [
        None,
        "10.0 points less accurate than vanilla (80.0 % against 90.0 %)",
    ]
