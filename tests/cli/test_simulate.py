from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest
from tests.commands import matcha_command
from tests.forks import start_command
from typer.testing import CliRunner

import matcha
from matcha.cli import app
from matcha.errors import MatchaError
from matcha.records import read_run
from matcha.strategies import Vanilla

QUICK = ["--num-train", 384, "--num-test", 60, "--compute-time", 0.5, "--link-time", 1]


def simulate(*arguments, **options):
    return matcha_command("simulate", "paper:er8", *QUICK, *arguments, **options)


def simulate_quadratic(*arguments):
    return matcha_command("simulate", "--task", "quadratic", "-e", 1, "--json", *arguments)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    result = simulate("-s", "vanilla", "-s", "periodic", "-b", 0.5, "-e", 3, "-o", folder, "--json")
    assert result.returncode == 0, result.stderr
    return folder, json.loads(result.stdout)


def test_json_records_and_figures(finished):
    folder, document = finished
    assert [row["label"] for row in document["rows"]] == ["vanilla", "periodic"]
    for row, units in zip(document["rows"], (5.0, 2.5), strict=True):
        run = read_run(row["path"])
        assert [record.epoch for record in run.records] == [1, 2, 3]
        assert run.header.clock == "simulated"
        assert run.header.command.startswith("matcha simulate")
        iterations = run.records[-1].iteration
        assert run.records[-1].comm_units == pytest.approx(units * iterations, abs=5)
        assert row["time"] == pytest.approx(iterations * 0.5 + run.records[-1].comm_units)
    for name in ("train_loss-epoch.png", "train_loss-time.png", "consensus_distance-epoch.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
        assert str(folder / name) in document["figures"]


def test_wires_stand_beside_whole_models(tmp_path):
    arguments = ["--task", "logistic", "-s", "silent,greedy", "-b", 0.05, "-e", 2, "-o", tmp_path]
    arguments += ["--wire", "float32,modulo:3", "--momentum", "outer"]
    result = simulate(*arguments, "--no-report", "--format", "none", "--json")
    assert result.returncode == 0, result.stderr
    silent, whole, coded = json.loads(result.stdout)["rows"]
    assert [row["label"] for row in (silent, whole, coded)] == [
        "silent",
        "greedy",
        "greedy, modulo:3",
    ]
    assert coded["path"].endswith("greedy-0.05-modulo3-s0")
    assert (coded["wire"], coded["momentum"]) == ("modulo:3", "outer")
    assert silent["megabytes_sent"] == 0
    # A tenth of the bytes per meeting, and ten times the meetings; of these few, a few more.
    assert 0 < coded["megabytes_sent"] < 3 * whole["megabytes_sent"]
    again = simulate(*arguments, "--json")
    assert again.returncode == 2
    assert "--resume" in again.stderr


def test_a_saved_plan_keeps_its_wire(tmp_path):
    path = tmp_path / "plan.json"
    assert matcha_command("plan", "ring:4", "--wire", "modulo:8", "-o", path).returncode == 0
    refused = simulate_quadratic("--plan", path, "--wire", "modulo:3", "-o", tmp_path / "runs")
    assert refused.returncode == 2
    assert "--wire is for planning" in refused.stderr


def test_table_for_people(tmp_path):
    result = simulate(
        "--task", "logistic", "-s", "matcha", "-e", 1, "-o", tmp_path, "--format", "none"
    )
    assert result.returncode == 0, result.stderr
    assert "logistic, 8 workers, simulated clock" in result.stdout
    assert "training loss" in result.stdout
    assert "clock: 500 ms of computing per iteration; " in result.stdout
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.parametrize("columns", [160, 80, 60])
def test_the_table_is_never_cut_short(finished, columns):
    folder, document = finished
    choices = ("-s", "vanilla", "-s", "periodic", "-b", 0.5, "-e", 3, "--resume", "-o", folder)
    result = simulate(*choices, "--format", "none", "--no-report", COLUMNS=str(columns))
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith(("run ", "periodic "))]
    assert "…" not in result.stdout
    assert "× vanilla" in result.stdout or "vanilla" in lines[0]
    assert f"{document['rows'][1]['speedup']:.2f}×" in lines[1]
    assert ("run time" in result.stdout) == (columns == 160)  # narrower, over two lines


def test_a_run_is_not_resumed_with_other_choices(finished):
    folder, _ = finished
    common = ("-s", "vanilla", "-e", 3, "--resume", "-o", folder)
    for changed in (["--batch-size", 8], ["--partition", "shards"]):
        result = simulate(*common, *changed)
        assert result.returncode == 2
        assert f"another {changed[0][2:].replace('-', '_')}" in result.stderr


def test_a_file_is_not_a_folder_for_runs(tmp_path):
    place = tmp_path / "file"
    place.touch()
    result = simulate("-s", "vanilla", "-e", 1, "-o", place)
    assert result.returncode == 2
    assert "a file stands where its folder should be" in result.stderr


def test_resume_ends_with_the_same_bits(finished, tmp_path):
    """Stop after the second of three epochs, with the third's record already on disk."""
    folder, _ = finished
    short = tmp_path / "short"
    common = ("-s", "vanilla", "-s", "periodic", "-b", 0.5, "-o", short, "--format", "none")
    shutil.copytree(folder, short)
    whole = (folder / "vanilla-1-s0/records.jsonl").read_text().splitlines()
    half = tmp_path / "half"
    result = simulate("-s", "vanilla", "-e", 3, "-o", half, "--format", "none")
    assert result.returncode == 0, result.stderr
    assert (half / "vanilla-1-s0/records.jsonl").read_text().splitlines() == whole

    # A run that was killed: no checkpoint, a record and half of one.
    (short / "vanilla-1-s0/checkpoint.pt").unlink()
    (short / "vanilla-1-s0/records.jsonl").write_text(whole[0] + "\n" + whole[1][:20])
    result = simulate(*common, "-e", 3, "--resume", "--json")
    assert result.returncode == 0, result.stderr
    assert (short / "vanilla-1-s0/records.jsonl").read_text().splitlines() == whole


def test_an_existing_run_is_not_overwritten(finished):
    folder, _ = finished
    result = simulate("-s", "vanilla", "-e", 3, "-o", folder)
    assert result.returncode == 2
    assert "already holds a run" in result.stderr
    assert "--resume" in result.stderr


def test_a_saved_plan_is_used(tmp_path):
    plan = tmp_path / "plan.json"
    made = matcha_command("plan", "ring:4", "-b", 0.5, "-s", "periodic", "-o", plan)
    assert made.returncode == 0, made.stderr
    result = simulate_quadratic("--plan", plan, "-o", tmp_path / "runs")
    assert result.returncode == 0, result.stderr
    (row,) = json.loads(result.stdout)["rows"]
    run = read_run(row["path"])
    assert run.header.num_workers == 4
    assert 0 < run.records[0].gradient_norm < run.records[0].gradient_bound
    assert (tmp_path / "runs" / "gradient_norm-epoch.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "digit"], "did you mean 'digits'"),
        (["--task", "cifar10"], "--data DIR or $MATCHA_DATA"),
        (["--partition", "sorted"], "partition must be"),
        (["--precision", "int8"], "precision must be"),
        (["--optimizer", "sdg"], "did you mean 'sgd'"),
        (["--model", "resnet21"], "did you mean"),
        (["-e", "0"], "epochs must be 1 or more, not 0"),
        (["-e", "-3"], "epochs must be 1 or more, not -3"),
        (["--lr", "0"], "learning rate must be above 0"),
        (["--device", "tpu"], "cpu or cuda"),
        (["--seed", "1", "--seed", "1"], "name each choice once"),
        (["--format", "gif"], "gif"),
    ],
)
def test_one_sentence_for_bad_input(tmp_path, monkeypatch, arguments, message):
    monkeypatch.delenv("MATCHA_DATA", raising=False)
    command = ["simulate", "paper:er8", "-e", "1", "-o", str(tmp_path / "runs"), *arguments]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, MatchaError)
    assert message in str(result.exception)


def test_a_staged_plan_is_used_beside_a_plain_one(staged_file, tmp_path):
    plain = tmp_path / "plain.json"
    made = matcha_command("plan", "ring:3", "-s", "vanilla", "-b", 1, "-o", plain)
    assert made.returncode == 0, made.stderr
    plans = ["--plan", plain, "--plan", staged_file]
    result = simulate_quadratic(*plans, "-o", tmp_path / "runs")
    assert result.returncode == 0, result.stderr
    runs = [read_run(row["path"]) for row in json.loads(result.stdout)["rows"]]
    assert [run.path.name for run in runs] == ["vanilla-1-s0", "staged-periodic-1-s0"]
    # A hundred iterations: three matchings in each, or in four and every fourth of the rest.
    assert [run.records[0].comm_units for run in runs] == [300, 3 * (4 + 96 / 4)]


def test_ctrl_c_says_how_to_go_on(tmp_path):
    command = [sys.executable, "-m", "matcha.cli", "simulate", "ring:4", "--task", "logistic"]
    command += ["-s", "periodic", "-e", "100000", "-o", str(tmp_path), "--seed", "3"]
    running = start_command(command, environment=os.environ, log=tmp_path / "log")
    records = tmp_path / "periodic-0.5-s3" / "records.jsonl"
    try:
        while not (records.exists() and records.read_text().count("\n") > 2):
            assert running.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.05)
        for _ in range(50):  # Python drops an interrupt that falls into a destructor: press again
            if "--resume" not in (tmp_path / "log").read_text():
                running.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                running.wait(timeout=3)
                break
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
    said = (tmp_path / "log").read_text()
    assert running.poll() == 130, said
    assert "--resume" in said
    assert "Traceback" not in said


def test_a_slow_worker_in_step_and_beside_it_asynchronously(tmp_path):
    given = ["--speeds", "1,1,1,1,1,1,1,0.25", "--asynchronous", "--no-report", "--format", "none"]
    result = simulate_quadratic(
        "-s", "allreduce,greedy", "-b", 0.3, "--compute-time", 1, "-o", tmp_path / "runs", *given
    )
    assert result.returncode == 0, result.stderr
    labels = [row["label"] for row in json.loads(result.stdout)["rows"]]
    assert labels == ["allreduce", "greedy 0.3", "greedy 0.3, asynchronous"]
    in_step, ahead = (
        read_run(tmp_path / "runs" / name)
        for name in ("greedy-0.3-s0", "greedy-0.3-s0-asynchronous")
    )
    assert in_step.records[-1].time >= 400
    assert ahead.records[0].time == pytest.approx(100)
    assert ahead.records[0].epoch == pytest.approx(7.25 / 8, abs=0.01)
    few = simulate_quadratic("--speeds", "1,2", "-o", tmp_path / "other")
    assert few.returncode == 2
    assert "2 speeds for 8 workers" in few.stderr
    assert not (tmp_path / "other").exists()


def test_by_default_greedy_is_there_with_the_messages_that_tune_would_choose(tmp_path):
    arguments = ["--task", "quadratic", "-e", 1, "-b", 0.1, "--format", "none", "--no-report"]
    done = matcha_command("simulate", *arguments, "-o", tmp_path, "--compute-time", 0.1)
    assert done.returncode == 0, done.stderr
    for name in ("silent", "allreduce", "local", "vanilla", "matcha", "greedy", "greedy, modulo:3"):
        assert f"\n{name} " in done.stdout
    assert "charged as a ring all-reduce on paper:er8" in done.stdout
    assert "mixing weights: each the best for the consensus error" in done.stdout
    plan = read_run(tmp_path / "vanilla-1-s0").plan
    assert plan.alpha == matcha.plan("paper:er8", 1.0, Vanilla(alpha="error")).alpha
    done = matcha_command("simulate", *arguments, "-o", tmp_path / "paper", "--compute-time", 0.1,
                          "-s", "vanilla", "--alpha", "rho", "--json")  # fmt: skip
    (row,) = json.loads(done.stdout)["rows"]
    assert read_run(row["path"]).plan.alpha == matcha.plan("paper:er8", 1.0, "vanilla").alpha


def test_exact_averages_are_charged_behind_a_switch_only_if_asked(tmp_path):
    arguments = ["-s", "allreduce", "--compute-time", 0.1, "--link-time", 1]
    on_links = json.loads(simulate_quadratic(*arguments, "-o", tmp_path / "a").stdout)["rows"][0]
    switch = simulate_quadratic(*arguments, "--switch", "-o", tmp_path / "b")
    assert on_links["comm_units"] == 2 * json.loads(switch.stdout)["rows"][0]["comm_units"]


def test_a_saved_plan_has_its_topology(tmp_path):
    path = tmp_path / "plan.json"
    assert matcha_command("plan", "ring:4", "-o", path).returncode == 0
    refused = matcha_command("simulate", "ring:8", "--plan", path, "-b", "0.2", cwd=tmp_path)
    assert refused.returncode == 2
    assert "the topology and --budget are for planning" in refused.stderr
