"""The main job, with real processes: small enough for a test, ended in every way."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest
from rich.console import Console
from tests.commands import matcha_command, matcha_process
from tests.report.runs import run_of
from tests.signals import hear_ctrl_c

from matcha.cli import output
from matcha.cli.demo import SMALL, make_jobs, make_plans, run_demo
from matcha.distributed.train import Network
from matcha.records import read_run
from matcha.report import compare
from matcha.topology import families

CHOICES = ("--strategy", "vanilla,greedy", "--budget", "0.5")


@pytest.mark.slow
def test_the_demo_trains_for_real_and_leaves_a_report(tmp_path):
    folder = tmp_path / "demo"
    done = matcha_process(
        "demo",
        "--topology",
        "ring:4",
        *CHOICES,
        "--target-loss",
        0.5,
        "--link-mbps",
        2000,
        "-o",
        folder,
        "--json",
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [row["strategy"] for row in document["rows"]] == ["vanilla", "greedy"]
    for row in document["rows"]:
        assert row["time_to_target"] > 0
        assert row["comm_seconds"] > 0
        assert row["train_loss"] <= 0.5
        assert row["test_accuracy"] > 0.6
    assert document["rows"][0]["speedup"] == 1
    run = read_run(folder / "greedy")
    assert sorted(run.worker_records) == [0, 1, 2, 3]
    assert {span.kind for span in run.spans} >= {"compute", "exchange"}
    assert run.header.command.startswith("matcha demo --topology ring:4")
    # The emulated speed is what the workers saw: vanilla sends two matchings every iteration.
    model_bytes = 4 * 301_066
    vanilla = read_run(folder / "vanilla")
    floor = 2 * 8 * model_bytes / 2e9 * vanilla.records[-1].iteration
    for records in vanilla.worker_records.values():
        assert sum(record.comm_seconds for record in records) >= 0.5 * floor  # of its own links
    assert "vanilla" in document["verdict"]
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "links emulated at 2000 Mbit/s" in page


def start(folder):
    command = [sys.executable, "-m", "matcha.cli", "demo", "--topology", "path:2", *CHOICES]
    return subprocess.Popen(
        [*command, "--link-mbps", "20", "-o", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "NO_COLOR": "1", "TERM": "dumb"},
        start_new_session=True,
        preexec_fn=hear_ctrl_c,
    )


def wait_until(condition, seconds=150):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the demo never got so far"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "moment"),
    [(signal.SIGINT, "starting"), (signal.SIGINT, "training"), (signal.SIGTERM, "training")],
)
def test_an_ended_demo_leaves_nothing_running(tmp_path, number, moment):
    demo = start(tmp_path / "demo")
    parent = psutil.Process(demo.pid)
    wait_until(lambda: len(parent.children(recursive=True)) >= 2)
    if moment == "training":
        wait_until((tmp_path / "demo" / "vanilla" / "run.json").exists)
    workers = parent.children(recursive=True)
    demo.send_signal(number)
    output, _ = demo.communicate(timeout=150)
    assert demo.returncode == 128 + number, output.decode()
    assert b"Traceback" not in output
    gone, alive = psutil.wait_procs(workers, timeout=150)
    assert alive == []
    assert len(gone) >= 2


def test_a_directory_in_use_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    done = matcha_command("demo", "-o", tmp_path)
    assert done.returncode == 2
    assert "not empty" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--strategy", "vanila"], "did you mean 'vanilla'"),
        (["--budget", "2"], "budget"),
        (["--link-mbps", "0"], "positive"),
        (["--link-mbps", "nan"], "link_mbps must be positive, not nan"),
        (["--target-loss", "-1"], "target_loss must be positive, not -1"),
        (["--time-limit", "0"], "seconds must be positive, not 0"),
        (["--strategy", ","], "at least one strategy"),
        (["--quick", "--time-limit", "9"], "leave one of the two out"),
    ],
)
def test_bad_input_is_one_sentence_before_anything_starts(tmp_path, arguments, sentence):
    done = matcha_command("demo", "-o", tmp_path / "demo", *arguments)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert not (tmp_path / "demo").exists()


def test_a_terminal_of_eighty_columns_shows_every_figure_whole(tmp_path, capsys, monkeypatch):
    losses = {"vanilla": [1.2345, 0.0211, 0.01234], "allreduce": [0.9876, 0.0222, 0.01111]}
    runs = [
        run_of(found, strategy=name, tmp_path=tmp_path, seconds=17.25, comm_seconds=16.5,
               test_accuracy=0.98765)
        for name, found in losses.items()
    ]  # fmt: skip
    runs = [replace(run, header=replace(run.header, clock="wall")) for run in runs]
    monkeypatch.setattr(output, "console", Console(width=80))
    output.print_comparison(compare(runs, 0.025), "to training loss 0.025")
    lines = capsys.readouterr().out.splitlines()
    assert sum("98.8 %" in line for line in lines) == 2, lines
    assert sum(line.count(" s") == 3 for line in lines) == 2, lines
    assert "accuracy" in "".join(lines), lines
    assert "…" not in "".join(lines), lines


def test_every_strategy_has_its_plan_and_its_run(tmp_path):
    graph = families.paper("er8")
    plans = make_plans(graph, ("vanilla", "periodic", SMALL), 0.5, 200.0, {(1, 3): 10.0}, 3)
    assert [plan.budget for plan in plans.values()] == [1.0, 0.5, 0.5]
    for plan in plans.values():
        assert plan.seed == 3
        times = dict(zip(plan.topology.links, plan.topology.link_times, strict=True))
        assert times[1, 3] == 10 * times[0, 1] == 10 * 32 * 301_066 / 200e6
    assert plans[SMALL].strategy == "greedy"
    assert plans[SMALL].wire.name.startswith("modulo")
    jobs = make_jobs(tmp_path, plans, 0.1, 3)
    assert [job.folder for job in jobs] == [tmp_path / name for name in plans]
    assert [job.plan for job in pickle.loads(pickle.dumps(jobs))] == list(plans.values())


def test_what_is_too_slow_ends_on_the_clock(tmp_path):
    plans = make_plans(families.parse("path:2"), ("vanilla",), 0.1, 500.0, {}, 0)
    run_demo(tmp_path, make_jobs(tmp_path, plans, 0.1, 0), Network(link_mbps=500.0), seconds=1e-9)
    run = read_run(tmp_path / "vanilla")
    assert [record.epoch for record in run.records] == [1]
    assert run.plan == plans["vanilla"]
    assert run.header.setting("link_mbps") == "500 (emulated)"
