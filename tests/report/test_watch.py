from __future__ import annotations

import threading
import time

import pytest
from rich.console import Console
from tests.quadratics import write_quadratic_run

import matcha
from matcha.errors import InputError
from matcha.records import Record, RunHeader, RunWriter, read_run
from matcha.report.watch import frame, is_finished, latest, sparkline, watch


def plan_of_four():
    return matcha.plan(matcha.families.ring(4), 0.5, "periodic")


def text_of(renderable):
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(renderable)
    return console.export_text()


def open_run(path, **config):
    header = RunHeader(
        name="r",
        kind="training",
        task="digits",
        strategy="periodic",
        budget=0.5,
        seed=0,
        num_workers=4,
        clock="wall",
        config=config,
    )
    return RunWriter(path, header, plan_of_four())


def test_a_frame_shows_loss_consensus_throughput_and_each_workers_links(tmp_path):
    run = read_run(write_quadratic_run(tmp_path / "run", plan_of_four(), iterations=40))
    text = text_of(frame(run))
    last = run.records[-1]
    assert "quadratics on ring:4" in text
    assert f"{last.train_loss:.4g}" in text
    assert f"{last.consensus_distance:.4g}" in text
    assert f"{last.iteration / last.time:.3g} iterations/s" in text
    talk = sum(r.comm_seconds for r in run.worker_records[2])
    busy = sum(r.compute_seconds for r in run.worker_records[2])
    assert text.count(f"━ {talk / (talk + busy):.0%}") == 4


def test_a_run_without_records_says_that_it_waits(tmp_path):
    open_run(tmp_path / "run").close()
    assert "waiting for the first record" in text_of(frame(latest(tmp_path)))


@pytest.mark.parametrize(
    ("config", "record", "finished"),
    [
        ({"epochs": 3}, {"epoch": 3.0}, True),
        ({"epochs": 3}, {"epoch": 2.0}, False),
        ({"target_loss": 0.5}, {"epoch": 1.0, "train_loss": 0.4}, False),
        ({"epochs": 9}, {"epoch": 1.0, "train_loss": float("nan")}, True),
        ({}, {"epoch": 9.0}, False),
    ],
)
def test_a_run_is_finished_when_its_configuration_says_so(tmp_path, config, record, finished):
    with open_run(tmp_path / "run", **config) as writer:
        assert not is_finished(read_run(tmp_path / "run"))
        writer.record(Record(iteration=1, **record))
    assert is_finished(read_run(tmp_path / "run")) is finished


def test_watching_follows_a_run_that_is_being_written_and_ends_with_it(tmp_path):
    def write():
        with open_run(tmp_path / "run", epochs=3) as writer:
            for epoch in range(1, 4):
                time.sleep(0.05)
                writer.record(Record(iteration=epoch, epoch=float(epoch), train_loss=1 / epoch))

    console = Console(width=120, record=True, force_terminal=True, file=open("/dev/null", "w"))  # noqa: SIM115
    thread = threading.Thread(target=write)
    thread.start()
    with console.file:
        # `until` says that a run is coming; it ends the view once the writer has ended.
        watch(tmp_path, until=lambda: not thread.is_alive(), refresh=0.02, console=console)
    thread.join()
    assert "epoch 3 of 3" in console.export_text()


def test_watching_nothing_is_an_error(tmp_path):
    with pytest.raises(InputError, match="holds no run"):
        watch(tmp_path)


def test_the_newest_of_several_runs_is_watched(tmp_path):
    import os

    for name, age in (("old", 100), ("new", 0)):
        open_run(tmp_path / name).close()
        for file in (tmp_path / name).iterdir():
            os.utime(file, (time.time() - age,) * 2)
    assert latest(tmp_path).path.name == "new"


def test_sparklines_rise_and_fall_and_survive_oddities():
    assert sparkline([3, 2, 1], width=3) == "█▅▁"
    assert sparkline([1, 10, 100], width=3, logarithmic=True) == "▁▅█"
    assert sparkline([float("nan"), -1.0], logarithmic=True) == ""
    assert len(sparkline(range(1000), width=32)) <= 32
    assert sparkline([5, 5]) == "▁▁"
