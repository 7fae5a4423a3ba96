from __future__ import annotations

import pytest
from tests.report.runs import run_of

from matcha.report import compare
from matcha.report.summary import Moment, common_target, find_moment


def test_one_evaluation_below_the_target_is_not_enough(tmp_path):
    lucky = run_of([4, 1, 3, 1.5, 1, 1], tmp_path=tmp_path)
    assert compare([lucky], target_loss=2).rows[0].time_to_target == pytest.approx(2 + 1 / 1.5)
    at_the_end = run_of([4, 3, 1], tmp_path=tmp_path)
    assert compare([at_the_end], target_loss=2).rows[0].time_to_target is None


def test_the_moment_lies_between_evaluations_by_a_straight_line(tmp_path):
    row = compare([run_of([4, 2, 2], seconds=10, tmp_path=tmp_path)], target_loss=3).rows[0]
    assert (row.time_to_target, row.epochs_to_target, row.comm_units) == (5, 0.5, 1)


def test_divergence_is_said_and_does_not_spoil_the_target(tmp_path):
    good = run_of([4, 2, 2], tmp_path=tmp_path)
    bad = run_of([4, 9, float("nan")], strategy="periodic", tmp_path=tmp_path)
    comparison = compare([good, bad])
    assert comparison.rows[1].diverged_at == 2
    assert comparison.target == 2
    assert comparison.rows[1].time_to_target is None
    assert compare([bad]).target == 9


def test_losses_beyond_all_reason_are_divergence(tmp_path):
    wild = run_of([4, 4], tmp_path=tmp_path, worker_loss=1e30)
    assert compare([wild]).rows[0].diverged_at == 0


def test_the_lowest_target_held_is_the_lowest_that_is_reached(tmp_path):
    run = run_of([4, 1, 3, 1.5, 2, 1], tmp_path=tmp_path)
    lowest = common_target([run], "train_loss")
    assert lowest == 2
    assert find_moment(run, "train_loss", lowest) == Moment(
        time=3 - 1 / 3, epoch=3 - 1 / 3, comm_units=6 - 2 / 3
    )
    assert find_moment(run, "train_loss", 1.99) is None


def test_a_common_target_is_one_that_every_run_held(tmp_path):
    held = [run_of(losses, tmp_path=tmp_path) for losses in ([4, 2, 2], [4, 3, 3], [1, 1, 9])]
    assert common_target(held, "train_loss") == 3
    assert common_target([*held, run_of([1], tmp_path=tmp_path)], "train_loss") is None
