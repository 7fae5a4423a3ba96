from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.commands import matcha_command, matcha_fork
from tests.signals import hear_ctrl_c

from matcha.plans import load_plan
from matcha.records import read_run


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["digitz"], "did you mean 'digits'"),
        (["nowhere.py"], "there is no script 'nowhere.py'"),
        (["digits", "--resume"], "--resume needs --output"),
        (["digits", "--wire", "int8"], "wire"),
        (["digits", "--momentum", "nesterov"], "momentum"),
        (["digits", "--", "--lr", "1"], "takes no arguments of its own"),
        (["digits", "--hosts", "2"], "--rendezvous"),
        (["digits", "-t", "ring:3", "--hosts", "2", "--rendezvous", "a:1"], "split evenly"),
        (["digits", "--plan", "nowhere.json"], "cannot be read"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path: Path, arguments, sentence) -> None:
    done = matcha_command("train", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "option", [["--tensorboard"], ["--watch"], ["--target-loss", "1"], ["--checkpoint-every", "2"]]
)
def test_options_that_a_script_would_not_hear_of_are_refused(tmp_path: Path, option) -> None:
    (tmp_path / "mine.py").touch()
    done = matcha_command("train", "mine.py", *option, cwd=tmp_path)
    assert done.returncode == 2
    assert f"{option[0]} is for tasks: a script trains by itself" in done.stderr


def test_options_that_would_be_ignored_are_named_together(tmp_path: Path) -> None:
    (tmp_path / "mine.py").touch()
    ignored = ["--tensorboard", "--watch", "--target-loss", "0.1", "--checkpoint-every", "2"]
    done = matcha_command("train", "mine.py", *ignored, "-o", "run", "--json", cwd=tmp_path)
    assert done.returncode == 2
    listed = "--target-loss, --checkpoint-every, --tensorboard, --watch and --json are for tasks"
    assert listed in done.stderr.replace("--output, ", "")
    assert "--output" in done.stderr


@pytest.mark.slow
def test_a_task_trains_and_resumes(tmp_path: Path) -> None:
    arguments = ["train", "quadratic", "-t", "path:2", "-s", "greedy", "-b", "0.5", "-o", "run"]
    arguments += ["--checkpoint-every", "1", "--overlap", "--wire", "bfloat16"]
    done = matcha_fork(*arguments, "--epochs", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "epoch 1/1" in done.stdout
    again = matcha_command(*arguments, cwd=tmp_path)
    assert again.returncode == 2
    assert "already holds a run" in again.stderr
    other = matcha_fork(*arguments, "--epochs", "2", "--lr", "1", "--resume", cwd=tmp_path)
    assert other.returncode == 2
    assert "was started with another schedule" in other.stderr
    resumed = matcha_fork(*arguments, "--epochs", "2", "--resume", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    over = matcha_fork(*arguments, "--epochs", "2", "--resume", cwd=tmp_path)
    assert over.returncode == 2
    assert over.stderr.startswith("matcha: there was nothing left to train")
    assert over.stderr.count("\n") == 1  # one sentence, and no worker was started to say it
    run = read_run(tmp_path / "run")
    assert [record.epoch for record in run.records] == [1.0, 2.0]
    assert run.header.strategy == "greedy"
    assert run.header.wire == run.plan.wire.name == "bfloat16"
    first, last = (record.megabytes_sent for record in run.records)
    assert first > 0
    assert last == pytest.approx(2 * first)
    assert sorted(run.worker_records) == [0, 1]
    assert all(len(records) == 2 for records in run.worker_records.values())


@pytest.mark.slow
def test_a_staged_plan_trains(staged_file, tmp_path: Path) -> None:
    arguments = ["logistic", "--plan", staged_file, "-o", "run", "--epochs", "1", "--no-report"]
    done = matcha_fork("train", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = read_run(tmp_path / "run")
    assert run.plan == load_plan(staged_file)
    (record,) = run.records
    spoken = sum(len(run.plan.round(k).matchings) for k in range(record.iteration))
    assert record.comm_units == spoken
    assert 0 < spoken < 3 * record.iteration


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "sentence"),
    [("1", "the same command with --output run --resume goes on"), ("0", "--checkpoint-every")],
)
def test_ctrl_c_says_whether_and_how_to_go_on(tmp_path: Path, every, sentence) -> None:
    command = [sys.executable, "-m", "matcha.cli", "train", "quadratic", "-t", "path:2"]
    command += ["-s", "greedy", "-o", "run", "-e", "100000", "--checkpoint-every", every]
    running = subprocess.Popen(
        command,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        stdout=subprocess.DEVNULL,
        preexec_fn=hear_ctrl_c,
    )
    records = tmp_path / "run" / "records.jsonl"
    try:
        while not (records.exists() and records.read_text().count("\n") > 2):
            assert running.poll() is None, running.stderr.read()
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=120)
    finally:
        running.kill()
    assert running.returncode == 130, said
    assert "Traceback" not in said
    assert sentence in said.splitlines()[-1]
