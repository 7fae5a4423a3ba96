from __future__ import annotations

import json
import os
import re
import signal
import sys
import time

import psutil
import pytest
from tests.commands import matcha_command, matcha_fork
from tests.forks import start_command
from tests.quadratics import write_quadratic_run

import matcha


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    plan = matcha.plan(matcha.families.ring(4), 0.5, "matcha")
    folder = tmp_path_factory.mktemp("runs") / "run"
    return write_quadratic_run(folder, plan, iterations=50, config={"epochs": 1})


def test_once_shows_a_finished_run(run):
    done = matcha_command("watch", run, "--once")
    assert done.returncode == 0, done.stderr
    assert "consensus distance" in done.stdout
    assert "talking" in done.stdout


def test_a_finished_run_ends_the_view_by_itself(run):
    done = matcha_command("watch", run)
    assert done.returncode == 0, done.stderr
    assert "epoch 1 of 1" in done.stdout


def test_the_newest_record_comes_as_json(run):
    record = json.loads(matcha_command("watch", run, "--json").stdout)
    assert record["iteration"] == 50


def test_no_run_is_one_sentence(tmp_path):
    done = matcha_command("watch", tmp_path)
    assert done.returncode == 2
    assert "holds no run" in done.stderr


@pytest.mark.slow
def test_training_can_be_watched_and_leaves_a_report(tmp_path):
    arguments = ("train", "logistic", "--topology", "path:2", "--epochs", 2, "--watch")
    done = matcha_fork(*arguments, "-o", tmp_path / "run", timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "epoch 2 of 2" in done.stdout
    assert (tmp_path / "run" / "logs" / "worker-1.log").exists()
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "matcha train logistic --topology path:2" in page


@pytest.mark.slow
def test_a_watched_worker_that_fails_is_quoted(tmp_path):
    arguments = ("train", "logistic", "--topology", "path:2", "--epochs", "1", "--watch")
    broken = {"GLOO_SOCKET_IFNAME": "nosuch0"}  # what only a worker can find out
    done = matcha_fork(*arguments, "-o", tmp_path / "run", timeout=240, **broken)
    assert done.returncode == 1  # as the worker itself
    # Both fail alike, and the one that ended first is named.
    assert re.match(r"matcha: worker [01] failed with exit code 1:", done.stderr)
    said = done.stderr.rstrip().splitlines()[-1]  # the end of its traceback, or all of it
    assert "RuntimeError:" in said
    assert "nosuch0" in said


def test_ending_a_watched_training_ends_its_workers(tmp_path):
    arguments = ["train", "logistic", "--topology", "path:2", "--epochs", "100000", "--watch"]
    command = [sys.executable, "-m", "matcha.cli", *arguments, "-o", str(tmp_path / "run")]
    train = start_command(command, environment=os.environ, log=tmp_path / "log")
    try:
        workers = wait_for(lambda: psutil.Process(train.pid).children(recursive=True), 2)
        train.send_signal(signal.SIGTERM)
        assert train.wait(150) == 128 + signal.SIGTERM, (tmp_path / "log").read_text()
        _, alive = psutil.wait_procs(workers, timeout=150)
        assert not alive, "a worker was left behind"
    finally:
        if train.poll() is None:
            os.killpg(train.pid, signal.SIGKILL)


def wait_for(look, number):
    end = time.monotonic() + 150
    while len(found := look()) < number:
        assert time.monotonic() < end, "the workers were not started"
        time.sleep(0.02)
    return found
