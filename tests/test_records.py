from __future__ import annotations

import json
import math

import pytest

import matcha
from matcha.errors import InputError
from matcha.records import (
    Record,
    RunHeader,
    RunWriter,
    Span,
    find_runs,
    follow,
    read_run,
    versions,
)
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


@pytest.mark.parametrize("name", ["records.jsonl", "worker-002.jsonl", "spans.jsonl"])
@pytest.mark.parametrize("damage", ['{"iteration": 2, "epo', "{}", "[1]", "\0\0\0"])
def test_a_damaged_line_in_the_middle_is_named(tmp_path, name, damage):
    with RunWriter(tmp_path, header(), PLAN) as writer:
        for k in (1, 2, 3):
            writer.record(Record(iteration=k, epoch=float(k)))
            writer.record(Record(iteration=k, epoch=float(k), worker=2))
            writer.record(Span(worker=2, iteration=k, kind="compute", start=0.0, end=1.0))
    lines = (tmp_path / name).read_text().splitlines()
    (tmp_path / name).write_text("\n".join([lines[0], damage, lines[2]]) + "\n")
    with pytest.raises(InputError, match=rf"line 2 of .*{name}.* is damaged: delete that line"):
        read_run(tmp_path)


@pytest.mark.parametrize("name", ["records.jsonl", "worker-002.jsonl", "spans.jsonl"])
def test_a_file_that_is_not_text_is_damaged(tmp_path, name):
    with RunWriter(tmp_path, header(), PLAN) as writer:
        writer.record(Record(iteration=1, epoch=1.0))
    (tmp_path / name).write_bytes(b'{"iteration": 1, "epoch\xf8": 1.0}\n')
    with pytest.raises(InputError, match=f"{name}' is damaged: it is not text"):
        read_run(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(InputError, match=f"{name}' cannot be read: "):
        read_run(tmp_path)


def test_records_that_are_followed_may_be_damaged_too(tmp_path):
    (tmp_path / "records.jsonl").write_bytes(b"\xf8\n")
    with pytest.raises(InputError, match="is damaged: it is not text"):
        next(follow(tmp_path))


def test_a_run_of_brackets_is_damaged(tmp_path):
    with RunWriter(tmp_path, header(), PLAN) as writer:
        writer.record(Record(iteration=1, epoch=1.0))
    (tmp_path / "worker-of-mine.jsonl").write_text("not a worker's\n")
    assert len(read_run(tmp_path).records) == 1
    (tmp_path / "records.jsonl").write_text("[" * 100_000 + "\n")
    with pytest.raises(InputError, match="line 1 of"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_text("[" * 100_000)
    with pytest.raises(InputError, match=r"no readable run\.json"):
        read_run(tmp_path)


def test_a_run_without_its_fields_is_damaged(tmp_path):
    with RunWriter(tmp_path, header(), PLAN):
        pass
    (tmp_path / "run.json").write_text(json.dumps({"schema": "matcha.run/2"}))
    with pytest.raises(InputError, match="damaged: it lacks a field"):
        read_run(tmp_path)


def test_runs_are_not_overwritten_but_can_be_resumed(tmp_path):
    with RunWriter(tmp_path, header(), PLAN) as writer:
        writer.record(Record(iteration=1, epoch=1.0))
    with pytest.raises(InputError, match="already holds a run"):
        RunWriter(tmp_path, header(), PLAN)
    with RunWriter(tmp_path, header(), PLAN, after=1) as writer:
        writer.record(Record(iteration=2, epoch=2.0))
    assert [record.iteration for record in read_run(tmp_path).records] == [1, 2]


def test_resuming_drops_what_will_be_run_again(tmp_path):
    def write(writer, iterations):
        for k in iterations:
            writer.record(Record(iteration=k, epoch=float(k)))
            writer.record(Record(iteration=k, epoch=float(k), worker=2, train_loss=math.inf))
            writer.record(Span(worker=2, iteration=k - 1, kind="compute", start=0.0, end=1.0))

    with RunWriter(tmp_path, header(), PLAN) as writer:
        write(writer, (1, 2, 3))
    before = (tmp_path / "worker-002.jsonl").read_text().splitlines()
    with (tmp_path / "records.jsonl").open("a") as file:
        file.write('{"iteration": 4, "epo')  # a crash while writing
    with RunWriter(tmp_path, header(), PLAN, after=2) as writer:
        assert [record.iteration for record in read_run(tmp_path).records] == [1, 2]
        write(writer, (3, 4))
    run = read_run(tmp_path)
    assert [record.iteration for record in run.records] == [1, 2, 3, 4]
    assert [record.iteration for record in run.worker_records[2]] == [1, 2, 3, 4]
    assert [span.iteration for span in run.spans] == [0, 1, 2, 3]
    assert (tmp_path / "worker-002.jsonl").read_text().splitlines()[:3] == before


def test_only_the_same_run_is_resumed(tmp_path):
    written_by_0_2 = {"rule": "eq2", "wire": None, "epochs": 3}
    kept = {"settings": written_by_0_2, "choices": {"batch_size": 8, "data": "a"}}
    with RunWriter(tmp_path, header(config=kept), PLAN):
        pass
    free = {"settings": {"overlap": False, "epochs": 9}, "choices": {"batch_size": 8, "data": "b"}}
    RunWriter(tmp_path, header(config=free), PLAN, after=0).close()
    other = {"settings": {"overlap": True}, "choices": {"batch_size": 16}}
    with pytest.raises(InputError, match="another overlap and batch_size"):
        RunWriter(tmp_path, header(config=other), PLAN, after=0)
    with pytest.raises(InputError, match="another task"):
        RunWriter(tmp_path, header(task="digits"), PLAN, after=0)


def test_only_the_primary_writes_what_is_of_the_whole_run(tmp_path):
    with RunWriter(tmp_path, header(), PLAN, primary=False) as writer:
        writer.record(Record(iteration=1, epoch=1.0))
        writer.record(Record(iteration=1, epoch=1.0, worker=3))
    assert [path.name for path in tmp_path.iterdir()] == ["worker-003.jsonl"]


def test_a_run_is_followed_line_by_line(tmp_path):
    following = follow(tmp_path)
    assert next(following) == []
    with RunWriter(tmp_path, header(), PLAN) as writer:
        writer.record(Record(iteration=1, epoch=1.0, train_loss=math.inf))
        (first,) = next(following)
        assert first.train_loss == math.inf
        with (tmp_path / "records.jsonl").open("a") as file:
            file.write('{"iteration": 2, ')
        assert next(following) == []
        with (tmp_path / "records.jsonl").open("a") as file:
            file.write('"epoch": 2}\n')
        assert [record.iteration for record in next(following)] == [2]


def test_settings_are_found_wherever_a_version_wrote_them():
    assert header(config={"epochs": 2}).setting("epochs") == 2
    assert header(config={"settings": {"epochs": 3}}).setting("epochs") == 3
    assert header().setting("epochs") is None


def test_foreign_directories_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"run\.json"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_text('{"schema": "other/1"}')
    with pytest.raises(InputError, match="another version"):
        read_run(tmp_path)


def test_versions_name_what_results_depend_on():
    assert {"python", "numpy", "scipy"} <= set(versions())
