from __future__ import annotations

from dataclasses import replace

import pytest
from tests.quadratics import write_quadratic_run

import matcha
from matcha.records import Record, Run, RunHeader, read_run
from matcha.report.groups import label_runs
from matcha.report.summary import compare, worker_comm_seconds


def run_of(
    losses, *, strategy="matcha", seconds=1.0, seed=0, budget=0.5, config=None, tmp_path, **fields
):
    header = RunHeader(
        name="r",
        kind="simulation",
        task="t",
        strategy=strategy,
        budget=budget,
        seed=seed,
        num_workers=2,
        clock="simulated",
        config=config or {},
    )
    records = tuple(
        Record(
            iteration=k,
            epoch=float(k),
            train_loss=v,
            time=k * seconds,
            comm_units=2.0 * k,
            **fields,
        )
        for k, v in enumerate(losses)
    )
    return Run(
        header=header, plan=None, records=records, worker_records={}, spans=(), path=tmp_path
    )


def test_the_default_target_is_the_lowest_loss_that_every_run_held(tmp_path):
    slow = run_of([4, 3, 2, 2], strategy="vanilla", seconds=10, tmp_path=tmp_path)
    fast = run_of([4, 2, 1, 1], tmp_path=tmp_path)
    comparison = compare([slow, fast])
    assert comparison.target == 2
    assert not comparison.given
    assert [row.time_to_target for row in comparison.rows] == [20, 1]
    assert [row.speedup for row in comparison.rows] == [1, 20]
    assert [row.comm_units for row in comparison.rows] == [4, 2]


def test_one_evaluation_below_the_target_is_not_enough(tmp_path):
    lucky = run_of([4, 1, 3, 1.5, 1, 1], tmp_path=tmp_path)
    assert compare([lucky], target=2).rows[0].time_to_target == pytest.approx(2 + 1 / 1.5)
    at_the_end = run_of([4, 3, 1], tmp_path=tmp_path)
    assert compare([at_the_end], target=2).rows[0].time_to_target is None


def test_the_moment_lies_between_evaluations_by_a_straight_line(tmp_path):
    row = compare([run_of([4, 2, 2], seconds=10, tmp_path=tmp_path)], target=3).rows[0]
    assert (row.time_to_target, row.epochs_to_target, row.comm_units) == (5, 0.5, 1)


def test_a_control_does_not_make_the_target_easy(tmp_path):
    silent = run_of([4, 4, 4], strategy="silent", tmp_path=tmp_path)
    vanilla = run_of([4, 2, 1], strategy="vanilla", tmp_path=tmp_path)
    assert compare([silent, vanilla]).target == 2


def test_the_runs_own_target_is_used_and_a_given_one_goes_before_it(tmp_path):
    runs = [run_of([4, 3, 2], config={"target_loss": 3.5}, tmp_path=tmp_path)] * 2
    assert compare(runs).target == 3.5
    assert compare(runs, target=2.5).target == 2.5


def test_a_run_that_misses_the_target_has_no_time_and_no_speedup(tmp_path):
    vanilla = run_of([4, 1, 1], strategy="vanilla", tmp_path=tmp_path)
    lazy = run_of([4, 3, 3], tmp_path=tmp_path)
    row = compare([vanilla, lazy], target=2).rows[1]
    assert row.time_to_target is None
    assert row.speedup is None
    assert row.comm_units == 4


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


def test_runs_of_the_same_seed_stay_apart(tmp_path):
    runs = [run_of([4, 2, 2], tmp_path=tmp_path)] * 2
    assert [row.label for row in compare(runs).rows] == ["matcha 0.5", "matcha 0.5 (2)"]


def test_without_losses_there_is_no_target(tmp_path):
    comparison = compare([run_of([None, None], tmp_path=tmp_path)])
    assert comparison.objective is None
    assert comparison.target is None


def test_labels_say_only_what_sets_runs_apart(tmp_path):
    def labels(*kinds):
        return label_runs(
            [run_of([1], strategy=s, budget=b, seed=k, tmp_path=tmp_path) for s, b, k in kinds]
        )

    assert labels(("matcha", 0.3, 0), ("greedy", 0.3, 0)) == ["matcha", "greedy"]
    assert labels(("matcha", 0.3, 0), ("matcha", 0.1, 0)) == ["matcha 0.3", "matcha 0.1"]
    assert labels(("matcha", 0.3, 0), ("matcha", 0.3, 1)) == [
        "matcha 0.3, seed 0",
        "matcha 0.3, seed 1",
    ]
    assert labels(("vanilla", 1, 0), ("vanilla", 1, 0), ("greedy", 0.1, 0), ("greedy", 0.2, 0)) == [
        "vanilla",
        "vanilla (2)",
        "greedy 0.1",
        "greedy 0.2",
    ]


def test_a_name_that_adds_to_the_label_is_the_label(tmp_path):
    names = ["matcha 0.3", "matcha 0.3", "matcha 0.3, twice as long", "elsewhere"]
    made = [
        run_of([1], strategy="matcha", budget=0.3, seed=k, tmp_path=tmp_path) for k in (0, 1, 0, 2)
    ]
    named = [
        replace(run, header=replace(run.header, name=name))
        for run, name in zip(made, names, strict=True)
    ]
    assert label_runs(named) == [
        "matcha 0.3, seed 0",
        "matcha 0.3, seed 1",
        "matcha 0.3, twice as long",
        "matcha 0.3, seed 2",
    ]


def test_communication_seconds_come_from_workers_records_or_spans(tmp_path):
    plan = matcha.plan(matcha.families.ring(4), 0.5, "matcha")
    run = read_run(write_quadratic_run(tmp_path / "run", plan, iterations=40, record_every=1))
    recorded = worker_comm_seconds(run)
    spans = worker_comm_seconds(replace(run, worker_records={}))
    assert recorded == pytest.approx(spans)
    half = worker_comm_seconds(run, until=run.records[19].time)
    assert sum(half.values()) < sum(recorded.values())
