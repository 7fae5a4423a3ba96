"""The examples and the recipes of docs/clusters.md, run as a user would."""

from __future__ import annotations

import difflib
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.commands import matcha_process
from tests.signals import hear_ctrl_c

import matcha
from matcha.records import read_run
from matcha.report import compare

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
MPIRUN = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")


def code_lines(name: str) -> list[str]:
    text = (EXAMPLES / name).read_text()
    body = text.split('"""', 2)[2]  # what the docstring says is not what adopting takes
    return [line for line in body.splitlines() if line.strip()]


def accuracy(output: str) -> float:
    (line,) = [line for line in output.splitlines() if line.startswith("test accuracy")]
    return float(line.split()[-1].rstrip("%"))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_adopting_gossip_changes_three_lines() -> None:
    before, after = code_lines("train_ddp.py"), code_lines("train_gossip.py")
    changes = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    assert sum(line.startswith("+") for line in changes) == 3
    assert sum(line.startswith("-") for line in changes) == 3
    assert len((EXAMPLES / "train_gossip.py").read_text().splitlines()) <= 65


def test_recording_a_run_adds_fifteen_lines_at_most() -> None:
    """To the plain script with DDP, Gossip's own lines included."""
    before, after = code_lines("train_ddp.py"), code_lines("train_recorded.py")
    added = [line for line in difflib.ndiff(before, after) if line.startswith("+")]
    assert len(added) <= 15


@pytest.mark.long("torchrun twice; test_recorder.py stops and resumes with workers as threads")
def test_a_recorded_script_is_stopped_by_ctrl_c_and_resumed(tmp_path: Path) -> None:
    output = tmp_path / "run"
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=4"]
    command += [str(EXAMPLES / "train_recorded.py"), str(output)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=hear_ctrl_c,
    ) as first:
        assert first.stdout is not None
        said = []
        for line in first.stdout:
            said.append(line)
            if line.startswith("epoch 2/"):
                os.killpg(first.pid, signal.SIGINT)  # as a terminal does: to all of them
    assert first.returncode != 0
    assert any("stopped; resume=True goes on at iteration" in line for line in said), said
    assert not (output / "report.html").exists()
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    run = read_run(output)
    assert [record.epoch for record in run.records] == list(range(1, len(run.records) + 1))
    assert len(run.records) < 20  # it stopped at its target
    (row,) = compare([run]).rows
    assert row.time_to_target is not None
    assert "report in" in done.stdout
    assert (output / "report.html").exists()


@pytest.mark.long(
    "two torchruns; test_launcher.py starts the workers of two hosts by a smaller script"
)
def test_two_hosts_with_two_workers_each_train_under_torchrun() -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    command = [
        *TORCHRUN,
        "--nnodes=2",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        "--local-addr=127.0.0.1",
        str(EXAMPLES / "train_gossip.py"),
        "--epochs=4",
    ]
    launchers = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        outputs = [launcher.communicate(timeout=150) for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
    assert [launcher.returncode for launcher in launchers] == [0, 0], outputs
    assert accuracy(outputs[0][0] + outputs[1][0]) > 80


@pytest.mark.slow
def test_the_script_before_adopting_runs_too() -> None:
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=2", str(EXAMPLES / "train_ddp.py")]
    for _ in range(3):
        done = subprocess.run([*command, "--epochs=4"], capture_output=True, text=True, timeout=150)
        # Nothing of ours runs here: DDP over gloo, seldom, aborts in its threads at the very end.
        if "terminate called without an active exception" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    assert accuracy(done.stdout) > 80


@pytest.mark.slow
def test_matcha_train_starts_a_script() -> None:
    script = EXAMPLES / "train_gossip.py"
    done = matcha_process("train", script, "--topology", "ring:4", "--", "--epochs", "1")
    assert done.returncode == 0, done.stderr
    assert accuracy(done.stdout) > 10


@pytest.mark.long("MPI; test_conformance.py runs every operation over it")
@pytest.mark.skipif(MPIRUN is None, reason="needs mpirun (pip install mpich)")
def test_a_task_trains_under_mpirun(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py", reason="needs the extra `mpi`")
    command = [MPIRUN, "-n", "3", sys.executable, "-m", "matcha.cli", "train", "logistic"]
    command += ["--topology", "ring:3", "--epochs", "2", "--output", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert len(read_run(tmp_path / "run").records) == 2


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_slurm_file_is_valid_and_asks_for_what_it_uses() -> None:
    file = EXAMPLES / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(file)], check=True)
    text = file.read_text()
    nodes = int(text.split("--nodes=")[1].split()[0])
    workers = int(text.split("WORKERS_PER_NODE=")[1].split()[0])
    rows, columns = map(int, text.split("torus:")[1].split()[0].split("x"))
    assert nodes * workers == rows * columns


@pytest.mark.long("Ray starts eight processes")
@pytest.mark.timeout(900)  # 32 s alone, minutes on a busy machine: Ray starts eight processes
def test_ray_train_starts_two_workers(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the extra `ray`")
    if " " in sys.executable:
        pytest.skip("Ray starts its workers through a shell that splits a path with a space")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "train_ray.py"), "--workers", "2", "--epochs", "3"],
        capture_output=True,
        text=True,
        timeout=840,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    line = next(line for line in (done.stdout + done.stderr).splitlines() if "test acc" in line)
    assert float(line.split()[-1].rstrip("%")) > 60


@pytest.mark.slow
def test_the_language_model_trains_and_saves_its_average(workers, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    script = EXAMPLES / "train_nanogpt.py"
    options = ["--workers=2", "--text=text.txt", "--steps=30", "--evaluate-every=15"]
    options += ["--context=16", "--width=32", "--layers=2"]
    said = workers.run(str(script), *options, num_workers=2)
    losses = [float(line.split()[-1]) for line in said[0].splitlines() if "test loss" in line]
    assert losses[-1] < losses[0] < 3.4  # 28 letters: log 28 = 3.33 knows nothing
    saved = torch.load(tmp_path / "gpt.pt", weights_only=True)
    assert torch.equal(saved["head.weight"], saved["tokens.weight"])
    assert len(script.read_text().splitlines()) < 120


@pytest.mark.slow
def test_images_train_on_groups_and_save_their_average(workers, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    image = pytest.importorskip("PIL.Image")
    for part in ("train", "val"):
        for label, color in (("dark", 20), ("light", 230)):
            folder = tmp_path / "images" / part / label
            folder.mkdir(parents=True)
            for number in range(8):
                image.new("RGB", (40, 40), (color, color, color - number)).save(
                    folder / f"{number}.png"
                )
    matcha.plan(matcha.families.path(2), strategy="matcha").save(tmp_path / "plan.json")
    options = ["images", "--plan=plan.json", "--group=2"]
    options += ["--model=small", "--epochs=2", "--batch=2", "--size=32", "--loaders=0"]
    said = workers.run(str(EXAMPLES / "train_imagenet.py"), *options, num_workers=4)
    assert any("epoch 2  accuracy 100.0%" in text for text in said)  # dark and light
    assert len(torch.load(tmp_path / "checkpoints" / "average.pt", weights_only=True)) == 9


def test_the_image_example_is_short() -> None:
    assert len((EXAMPLES / "train_imagenet.py").read_text().splitlines()) < 120
