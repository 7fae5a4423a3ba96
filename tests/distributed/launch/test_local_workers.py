from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from matcha.distributed.launch.launcher import LocalWorkers
from matcha.errors import ExchangeError, InputError


def test_workers_get_what_torchrun_would_set(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, sys\n"
        "names = 'RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MINE'.split()\n"
        "file = pathlib.Path(sys.argv[1], os.environ['RANK'])\n"
        "file.write_text(' '.join(map(os.getenv, names)))\n"
        "assert int(os.environ['MASTER_PORT']) > 0\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with LocalWorkers(command, 3, environment={"MINE": "x"}) as workers:
        assert workers.wait() == [0, 0, 0]
    for rank in range(3):
        assert (tmp_path / str(rank)).read_text() == f"{rank} {rank} 3 3 127.0.0.1 x"


def test_a_further_worker_has_an_environment_of_its_own_also_when_it_is_started_again(
    tmp_path: Path,
) -> None:
    command = ["sh", "-c", f'echo "$RANK $WHO" >> {tmp_path}/said']
    with LocalWorkers(command, 1, environment={"WHO": "all"}) as workers:
        assert workers.wait() == [0]
        assert workers.add({"WHO": "one"}) == 1
        assert workers.wait() == [0, 0]
        workers.restart(1)
        assert workers.wait() == [0, 0]
        workers.restart(0, {"WHO": "other"})
        assert workers.wait() == [0, 0]
    assert (tmp_path / "said").read_text().split("\n")[:-1] == [
        "0 all",
        "1 one",
        "1 one",
        "0 other",
    ]


def test_once_one_has_failed_the_others_are_stopped() -> None:
    command = ["sh", "-c", '[ "$RANK" = 1 ] && exit 7; exec sleep 600']
    started = time.monotonic()
    with LocalWorkers(command, 3) as workers:
        codes = workers.wait(grace=0.2)
    assert codes[1] == 7
    assert codes[0] == codes[2] == -signal.SIGTERM
    assert time.monotonic() - started < 60


def test_what_a_worker_started_ends_with_it(tmp_path: Path) -> None:
    command = ["sh", "-c", f"sleep 600 & echo $! > {tmp_path}/pid; wait"]
    with LocalWorkers(command, 1):
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.02)
    pid = int((tmp_path / "pid").read_text())
    end = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and "Z" not in _state(pid):
        assert time.monotonic() < end, "an orphan is left behind"
        time.sleep(0.02)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"


def test_even_a_stopped_worker_is_ended() -> None:
    with LocalWorkers(["sleep", "600"], 2) as workers:
        workers.processes[0].send_signal(signal.SIGSTOP)
    assert all(process.poll() is not None for process in workers.processes)


def test_too_slow_workers_are_an_error() -> None:
    with LocalWorkers(["sleep", "600"], 2) as workers, pytest.raises(ExchangeError, match="within"):
        workers.wait(timeout=0.3)
    assert all(process.poll() is not None for process in workers.processes)


def test_no_worker_is_refused() -> None:
    with pytest.raises(InputError, match="at least one"):
        LocalWorkers(["true"], 0)


def test_each_worker_has_its_own_log(tmp_path: Path) -> None:
    command = ["sh", "-c", 'echo hello; echo "I am $RANK" >&2; [ "$RANK" = 0 ]']
    with LocalWorkers(command, 2, logs=tmp_path / "logs") as workers:
        assert workers.wait() == [0, 1]
        assert workers.ended
        assert [workers.last_words(rank) for rank in (0, 1)] == [["I am 0"], ["I am 1"]]
    assert (tmp_path / "logs" / "worker-1.log").read_text() == "hello\nI am 1\n"


def test_a_silent_worker_has_no_last_words(tmp_path: Path) -> None:
    with LocalWorkers(["true"], 1, logs=tmp_path) as workers:
        workers.wait()
        assert workers.last_words(0) == []
