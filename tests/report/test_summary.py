from __future__ import annotations

from dataclasses import replace

import pytest
from tests.quadratics import write_quadratic_run

import matcha
from matcha.records import Record, Run, RunHeader, read_run
from matcha.report.summary import compare, label_runs, worker_comm_seconds


def run_of(losses, *, strategy="matcha", seconds=1.0, seed=0, budget=0.5, config=None, tmp_path):
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
        Record(iteration=k, epoch=float(k), train_loss=v, time=k * seconds, comm_units=2.0 * k)
        for k, v in enumerate(losses)
    )
    return Run(
        header=header, plan=None, records=records, worker_records={}, spans=(), path=tmp_path
    )


def test_the_default_target_is_the_lowest_loss_that_every_run_reached(tmp_path):
    slow = run_of([4, 3, 2], strategy="vanilla", seconds=10, tmp_path=tmp_path)
    fast = run_of([4, 2, 1], tmp_path=tmp_path)
    comparison = compare([slow, fast])
    assert comparison.target == 2
    assert not comparison.given
    assert [row.time_to_target for row in comparison.rows] == [20, 1]
    assert [row.speedup for row in comparison.rows] == [1, 20]
    assert [row.comm_units for row in comparison.rows] == [4, 2]


def test_the_runs_own_target_is_used_and_a_given_one_goes_before_it(tmp_path):
    runs = [run_of([4, 3, 2], config={"target_loss": 3.5}, tmp_path=tmp_path)] * 2
    assert compare(runs).target == 3.5
    assert compare(runs, target=2.5).target == 2.5


def test_a_run_that_misses_the_target_has_no_time_and_no_speedup(tmp_path):
    vanilla = run_of([4, 1], strategy="vanilla", tmp_path=tmp_path)
    lazy = run_of([4, 3], tmp_path=tmp_path)
    row = compare([vanilla, lazy], target=2).rows[1]
    assert row.time_to_target is None
    assert row.speedup is None
    assert row.comm_units == 2


def test_divergence_is_said_and_does_not_spoil_the_target(tmp_path):
    good = run_of([4, 2], tmp_path=tmp_path)
    bad = run_of([4, 9, float("nan")], strategy="periodic", tmp_path=tmp_path)
    comparison = compare([good, bad])
    assert comparison.rows[1].diverged_at == 2
    assert comparison.target == 2
    assert comparison.rows[1].time_to_target is None
    assert compare([bad]).target == 4


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
