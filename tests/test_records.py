from __future__ import annotations

import json
import math

import pytest

import matcha
from matcha.errors import InputError
from matcha.records import Record, RunHeader, RunWriter, Span, find_runs, read_run, versions
from matcha.strategies import staged_plan

PLAN = matcha.plan(matcha.families.ring(4), strategy="vanilla", budget=1.0)


def header(**changes):
    values = {
        "name": "vanilla", "kind": "simulation", "task": "quadratic", "strategy": "vanilla",
        "budget": 1.0, "seed": 0, "num_workers": 4, "clock": "simulated",
    }  # fmt: skip
    return RunHeader(**{**values, **changes})


def test_a_run_comes_back_as_it_was_written(tmp_path):
    first = Record(iteration=1, epoch=0.5, train_loss=0.25, comm_units=2.0, time=1.5)
    diverged = Record(iteration=2, epoch=1.0, train_loss=math.inf, test_accuracy=0.5)
    mine = Record(iteration=1, epoch=0.5, worker=3, compute_seconds=0.1, comm_seconds=0.2)
    span = Span(worker=3, iteration=1, kind="exchange", start=0.0, end=0.2)
    with RunWriter(tmp_path / "run", header(config={"lr": 0.1}), PLAN) as writer:
        for record in (first, diverged, mine):
            writer.record(record)
        writer.record(span)
    run = read_run(tmp_path / "run")
    assert run.header.config == {"lr": 0.1}
    assert run.records == (first, diverged)
    assert run.worker_records == {3: (mine,)}
    assert run.spans == (span,)
    assert run.plan == PLAN
    assert find_runs(tmp_path) == [tmp_path / "run"]


def test_a_staged_plan_comes_back_with_its_run(tmp_path):
    staged = staged_plan(matcha.families.ring(4), {0: 0.2, 10: 0.6})
    with RunWriter(tmp_path, header(), staged) as writer:
        writer.record(Record(iteration=1, epoch=1.0))
    assert read_run(tmp_path).plan == staged


def test_lines_are_json_even_for_infinities(tmp_path):
    with RunWriter(tmp_path, header(), PLAN) as writer:
        writer.record(Record(iteration=1, epoch=1.0, train_loss=math.nan))
    line = (tmp_path / "records.jsonl").read_text()
    assert "NaN" not in line
    assert math.isnan(read_run(tmp_path).records[0].train_loss)
    assert json.loads(line)["train_loss"] == "nan"


def test_a_line_cut_by_a_crash_is_left_out(tmp_path):
    with RunWriter(tmp_path, header(), PLAN) as writer:
        writer.record(Record(iteration=1, epoch=1.0))
    with (tmp_path / "records.jsonl").open("a") as file:
        file.write('{"iteration": 2, "epo')
    assert [record.iteration for record in read_run(tmp_path).records] == [1]


def test_runs_are_not_overwritten_but_can_be_resumed(tmp_path):
    with RunWriter(tmp_path, header(), PLAN) as writer:
        writer.record(Record(iteration=1, epoch=1.0))
    with pytest.raises(InputError, match="already holds a run"):
        RunWriter(tmp_path, header(), PLAN)
    with RunWriter(tmp_path, header(), PLAN, after=1) as writer:
        writer.record(Record(iteration=2, epoch=2.0))
    assert [record.iteration for record in read_run(tmp_path).records] == [1, 2]


def test_foreign_directories_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"run\.json"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_text('{"schema": "other/1"}')
    with pytest.raises(InputError, match="another version"):
        read_run(tmp_path)


def test_versions_name_what_results_depend_on():
    assert {"python", "numpy", "scipy"} <= set(versions())
