from __future__ import annotations

from dataclasses import replace

import pytest
from tests.quadratics import write_quadratic_run
from tests.report.runs import run_of

import matcha
from matcha.records import read_run
from matcha.report import compare
from matcha.report.summary import worker_comm_seconds


def test_the_default_target_is_the_lowest_loss_that_every_run_held(tmp_path):
    slow = run_of([4, 3, 2, 2], strategy="vanilla", seconds=10, tmp_path=tmp_path)
    fast = run_of([4, 2, 1, 1], tmp_path=tmp_path)
    comparison = compare([slow, fast])
    assert comparison.target == 2
    assert not comparison.given
    assert [row.time_to_target for row in comparison.rows] == [20, 1]
    assert [row.speedup for row in comparison.rows] == [1, 20]
    assert [row.comm_units for row in comparison.rows] == [4, 2]


def test_a_control_does_not_make_the_target_easy(tmp_path):
    silent = run_of([4, 4, 4], strategy="silent", tmp_path=tmp_path)
    vanilla = run_of([4, 2, 1], strategy="vanilla", tmp_path=tmp_path)
    assert compare([silent, vanilla]).target == 2


def test_a_run_that_sent_nothing_does_not_make_the_target_easy(tmp_path):
    idle = run_of([4, 4, 4], strategy="periodic", megabytes_sent=0.0, tmp_path=tmp_path)
    vanilla = run_of([4, 2, 1], strategy="vanilla", megabytes_sent=1.0, tmp_path=tmp_path)
    assert compare([idle, vanilla]).target == 2


def test_the_runs_own_target_is_used_and_a_given_one_goes_before_it(tmp_path):
    runs = [run_of([4, 3, 2], config={"target_loss": 3.5}, tmp_path=tmp_path)] * 2
    assert compare(runs).target == 3.5
    assert compare(runs, target_loss=2.5).target == 2.5


@pytest.mark.parametrize("losses", [[], [None, None]])
def test_a_run_that_recorded_nothing_or_diverged_takes_nothing_from_the_others(losses, tmp_path):
    lost = {"worker_loss": float("nan")} if losses else {}
    broken = run_of(losses, strategy="greedy", tmp_path=tmp_path, **lost)
    sound = [run_of([4, 2, 1], strategy=name, tmp_path=tmp_path) for name in ("vanilla", "matcha")]
    comparison = compare([broken, *sound])
    assert comparison.target == 2
    assert [row.time_to_target for row in comparison.rows] == [None, 1, 1]
    assert compare([broken]).target is None


def test_a_target_held_at_the_first_evaluation_makes_no_factor(tmp_path):
    names = ("vanilla", "greedy")
    runs = [
        run_of([None, 1, 0.9, 0.8], strategy=name, seconds=seconds, seed=seed, tmp_path=tmp_path)
        for name, seconds in zip(names, (1.1, 1.0), strict=True)
        for seed in (0, 1, 2)
    ]
    early = compare(runs, target_loss=2.0)
    assert [row.at_first_evaluation for row in early.rows] == [True, True]
    assert early.winner is None
    assert [row.speedup for row in early.rows] == [1.0, None]
    late = compare(runs, target_loss=0.9)
    assert not late.rows[0].at_first_evaluation
    assert late.winner == 1


def test_without_losses_there_is_no_target(tmp_path):
    comparison = compare([run_of([None, None], tmp_path=tmp_path)])
    assert comparison.objective is None
    assert comparison.target is None


def test_communication_seconds_come_from_workers_records_or_spans(tmp_path):
    plan = matcha.plan(matcha.families.ring(4), 0.5, "matcha")
    run = read_run(write_quadratic_run(tmp_path / "run", plan, iterations=40, record_every=1))
    recorded = worker_comm_seconds(run)
    spans = worker_comm_seconds(replace(run, worker_records={}))
    assert recorded == pytest.approx(spans)
    half = worker_comm_seconds(run, until=run.records[19].time)
    assert sum(half.values()) < sum(recorded.values())
