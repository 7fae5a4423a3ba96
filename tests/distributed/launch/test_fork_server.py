"""Workers forked from one process are what processes of their own would be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Pipe
from pathlib import Path

import pytest

from matcha.distributed.launch.fork_server import _SERVE, can_be_forked
from matcha.distributed.launch.launcher import LocalWorkers
from matcha.errors import WorkerError

SCRIPT = """
import os, pathlib, random, sys, threading, time
folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
here = [__name__, sys.argv[0] == __file__, sys.path[0] == str(pathlib.Path(__file__).parent)]
early = "torch._dynamo" in sys.modules  # before anything that this script imports
import numpy
print(*here, early, os.getsid(0) == os.getpid(), threading.active_count(), flush=True)
print(random.random(), numpy.random.random())
name = folder / f"pid-{rank}-{os.getpid()}"
name.with_suffix(".new").write_text("")
name.with_suffix(".new").rename(name)
if rank == "1":
    raise ValueError("of worker 1")
if rank == "2":
    sys.exit(5)
if rank == "3":
    time.sleep(600)
"""

pytestmark = pytest.mark.skipif(
    not can_be_forked([sys.executable, "x.py"]), reason="forks on Linux, without a GPU"
)


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def wait_for(folder: Path, rank: int, number: int = 1) -> list[int]:
    """The processes that a worker has had."""
    end = time.monotonic() + 150
    while len(found := list(folder.glob(f"pid-{rank}-*[0-9]"))) < number:
        assert time.monotonic() < end, "the worker was not started"
        time.sleep(0.02)
    return [int(path.name.rsplit("-", 1)[1]) for path in found]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: list[int]) -> None:
    end = time.monotonic() + 150
    while any(map(is_running, pids)):
        assert time.monotonic() < end, "a worker was left behind"
        time.sleep(0.02)


def test_forked_workers_are_as_processes_of_their_own(script: str, tmp_path: Path) -> None:
    command = [sys.executable, script, str(tmp_path)]
    with LocalWorkers(command, 4, logs=tmp_path / "logs", forked=True) as workers:
        first = wait_for(tmp_path, 3)
        workers.processes[3].send_signal(signal.SIGKILL)
        codes = [process.wait(150) for process in workers.processes]
        assert codes == [0, 1, 5, -signal.SIGKILL]
        assert workers.last_words(1)[-1] == "ValueError: of worker 1"
        workers.restart(3)
        again = wait_for(tmp_path, 3, number=2)
        workers.processes[3].send_signal(signal.SIGSTOP)  # and still it is ended
    assert workers.processes[3].poll() == -signal.SIGTERM
    wait_until_gone([*first, *again])
    logs = [(tmp_path / "logs" / f"worker-{rank}.log").read_text().split("\n") for rank in range(4)]
    assert {log[0] for log in logs} == {"__main__ True True True True 1"}
    assert len({log[1] for log in logs}) == 4, "workers drew the same random numbers"


@pytest.mark.parametrize("who", ["launcher", "server"])
def test_none_outlives_launcher_or_fork_server(
    script: str, tmp_path: Path, who: str, request
) -> None:
    launch_script = (
        "import sys\nfrom matcha.distributed.launch.launcher import LocalWorkers\n"
        "workers = LocalWorkers(sys.argv[1:], 4, forked=True)\n"
        "print(workers._server._process.pid, flush=True)\n"
        "sys.exit([process.wait() for process in workers.processes][3] != -15)\n"
    )
    command = [sys.executable, "-c", launch_script, sys.executable, script, str(tmp_path)]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    request.addfinalizer(launcher.kill)
    pids = wait_for(tmp_path, 3)
    assert launcher.stdout is not None
    said = (line.split() for line in launcher.stdout)  # between what workers say
    server = next(int(words[0]) for words in said if len(words) == 1)
    os.kill(launcher.pid if who == "launcher" else server, signal.SIGKILL)
    wait_until_gone([*pids, server])
    launcher.stdout.close()
    assert launcher.wait(150) == (-signal.SIGKILL if who == "launcher" else 0)


def test_a_killed_server_is_said_in_a_sentence(script: str, tmp_path: Path) -> None:
    """A worker that was to be started again then ended the launcher with a traceback."""
    command = [sys.executable, script, str(tmp_path)]
    with LocalWorkers(command, 4, logs=tmp_path / "logs", forked=True) as workers:
        wait_for(tmp_path, 3)
        assert workers._server is not None
        os.kill(workers._server._process.pid, signal.SIGKILL)
        assert workers.processes[3].wait(150) == -signal.SIGTERM
        with pytest.raises(WorkerError, match=r"workers are forked has ended \(SIGKILL\)"):
            workers.restart(3)


def test_a_launcher_that_is_gone_is_no_error(script: str, tmp_path: Path) -> None:
    """Ctrl-C while workers are started: who was asked for a fork finds nobody to tell of it."""
    ours, theirs = Pipe()
    command = [sys.executable, "-c", _SERVE, str(theirs.fileno())]
    environment = {**os.environ, "RANK": "3"}
    with theirs:
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
    ours.send(([script, str(tmp_path)], environment, str(tmp_path), None, "wb"))
    ours.close()
    assert process.communicate(timeout=150)[1] == b""
    assert process.returncode == 0


def test_only_python_running_a_file_or_module_is_forked() -> None:
    assert can_be_forked([sys.executable, "-m", "matcha.cli"])
    assert not can_be_forked([sys.executable, "-c", "pass"])
    assert not can_be_forked(["sh", "script"])
