from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.signals import hear_ctrl_c

from matcha.distributed.launch import launcher
from matcha.distributed.launch.launcher import Hosts, LocalWorkers, launch
from matcha.errors import ExchangeError, InputError, WorkerError

RANK = "import os, signal, sys, time; rank = int(os.environ['RANK']); "


def test_workers_that_end_well_end_the_launch(tmp_path: Path) -> None:
    script = RANK + "open(f'{sys.argv[1]}/{rank}', 'w').write(os.environ['MINE'])"
    launch(["-c", script, str(tmp_path)], 2, environment={"MINE": "x"})
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["x", "x"]


@pytest.mark.parametrize(
    ("script", "kind", "exit_code", "sentence"),
    [
        # One fails by itself and the other loses it: the first is the cause.
        ("sys.exit(7 if rank else 3)", WorkerError, 7, "worker 1 failed with exit code 7"),
        ("sys.exit(2 if rank else 3)", WorkerError, 2, "worker 1 failed with exit code 2"),
        # One is killed; what the other makes of it is a consequence.
        ("os.kill(os.getpid(), 9) if rank else sys.exit(1)", ExchangeError, 3, "1 .* by SIGKILL"),
        ("sys.exit(3)", ExchangeError, 3, "worker 0 lost another"),
    ],
)
def test_the_worker_that_explains_the_others_is_named(script, kind, exit_code, sentence) -> None:
    with pytest.raises(kind, match=sentence) as caught:
        launch(["-c", RANK + script], 2)
    assert caught.value.exit_code == exit_code


def test_the_last_words_of_a_logged_worker_are_quoted(tmp_path: Path) -> None:
    script = RANK + "print('I give up') if rank else None; sys.exit(5 * rank)"
    with pytest.raises(WorkerError, match="worker 1 failed with exit code 5: I give up"):
        launch(["-c", script], 2, logs=tmp_path)


SCRIPT = """
import os, sys
from pathlib import Path
from matcha.errors import ExchangeError
folder, kind = Path(sys.argv[1]), sys.argv[2]
if os.environ["RANK"] == "1":
    def step():
        raise ValueError("the loss is a string")
    sys.exit(4) if kind == "exit" else step()
while not list(folder.glob("gone-*")):  # the launcher touches it when worker 1 has ended
    pass
raise ExchangeError("rank 1 closed its connection") if kind == "raise" else RuntimeError("alone")
"""


@pytest.mark.parametrize("forked", [True, False])
@pytest.mark.parametrize("kind", ["raise", "exit"])
def test_the_first_to_fail_by_itself_is_blamed_and_its_last_lines_repeated(
    tmp_path: Path, monkeypatch, capfd, kind: str, forked: bool
) -> None:
    """Worker 0 fails after worker 1, as one that loses another does."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    restart_or_poll = LocalWorkers.poll

    def poll(workers: LocalWorkers) -> list[int | None]:
        codes = restart_or_poll(workers)
        if codes[1] is not None:
            (tmp_path / "gone-1").touch()
        return codes

    monkeypatch.setattr(LocalWorkers, "poll", poll)
    if not forked:
        monkeypatch.setattr(launcher, "can_be_forked", lambda _: False)
    with pytest.raises(WorkerError) as caught:
        launch([str(script), str(tmp_path), kind], 2)
    said = str(caught.value)
    if kind == "exit":
        assert said == "worker 1 failed with exit code 4."
        return
    assert said.startswith("worker 1 failed with exit code 1:\n")
    assert 'line 8, in step\n      raise ValueError("the loss is a string")' in said
    assert said.endswith("\n  ValueError: the loss is a string")
    errors = capfd.readouterr().err
    assert "worker 0: rank 1 closed its connection\n" in errors  # and no traceback of that
    assert errors.count("Traceback") == 1


def test_meanwhile_follows_until_it_is_time_to_end(tmp_path: Path) -> None:
    seen = []

    def follow(ended) -> None:
        end = time.monotonic() + 150
        while not ended():
            assert time.monotonic() < end
            time.sleep(0.01)
        seen.extend(path.name for path in tmp_path.iterdir())

    script = RANK + "open(sys.argv[1] + '/started', 'w').close()"
    launch(["-c", script, str(tmp_path)], 1, meanwhile=follow)
    assert seen == ["started"]


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL], ids=lambda s: s.name
)
def test_ending_the_launcher_ends_the_workers(tmp_path: Path, number, request) -> None:
    script = (
        "import sys\nfrom matcha.distributed.launch.launcher import launch\n"
        f'launch([\'-c\', \'import os; open("{tmp_path}/" + os.environ["RANK"], "w")'
        f".write(str(os.getpid())); import time; time.sleep(600)'], 2)\n"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", script], stderr=subprocess.DEVNULL, preexec_fn=hear_ctrl_c
    )
    request.addfinalizer(launcher.terminate)  # whatever happens below, nothing stays
    files = [tmp_path / "0", tmp_path / "1"]
    end = time.monotonic() + 150
    while not all(file.exists() and file.read_text().strip() for file in files):
        assert time.monotonic() < end, "the workers were not started"
        time.sleep(0.05)
    pids = [int(file.read_text()) for file in files]
    time.sleep(1)  # the last worker may be up before Popen has returned it
    launcher.send_signal(number)
    assert launcher.wait(150) != 0
    end = time.monotonic() + 150
    while any(_is_running(pid) for pid in pids):
        assert time.monotonic() < end, "a worker was left behind"
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_worker_that_fails_is_started_again_while_the_others_go_on(tmp_path: Path) -> None:
    # Worker 1 fails twice; worker 0 ends only when it has seen it come a third time.
    script = RANK + (
        "import pathlib; tries = pathlib.Path(sys.argv[1]); end = time.monotonic() + 150\n"
        "if rank == 1:\n"
        "    n = len(list(tries.iterdir())); (tries / str(n)).touch()\n"
        "    sys.exit(9 if n < 2 else 0)\n"
        "while len(list(tries.iterdir())) < 3:\n"
        "    assert time.monotonic() < end; time.sleep(0.02)\n"
    )
    tries = tmp_path / "tries"
    tries.mkdir()
    launch(["-c", script, str(tries)], 2, restarts=2, logs=tmp_path / "logs")
    assert len(list(tries.iterdir())) == 3


def test_restarts_have_an_end_and_the_team_goes_on(tmp_path: Path, caplog) -> None:
    launch(["-c", RANK + "sys.exit(9 * rank)"], 2, restarts=1)
    assert "workers [1] were given up after 1 restarts" in caplog.text
    with pytest.raises(WorkerError, match="worker 0 failed with exit code 9"):
        launch(["-c", "import sys; sys.exit(9)"], 2, restarts=1)


def test_the_store_listens_to_this_machine_only() -> None:
    with LocalWorkers(["sleep", "600"], 1) as workers:
        port = f"{workers._store.port:04X}"
        lines = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
        heard = [line.split()[1] for line in lines.splitlines() if line.split()[3] == "0A"]
        assert [address for address in heard if address.endswith(f":{port}")] == [
            f"0100007F:{port}"
        ]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"number": 2}, "--rendezvous"),
        ({"rendezvous": "a:1"}, "--hosts"),
    ],
)
def test_hosts_and_their_meeting_place_go_together(options, sentence) -> None:
    with pytest.raises(InputError, match=sentence):
        Hosts(**options)


def test_an_uneven_split_is_refused() -> None:
    with pytest.raises(InputError, match="cannot be split evenly"):
        launch(["-c", ""], 3, hosts=Hosts(number=2, rendezvous="a:1"))


@pytest.mark.slow
def test_torchrun_starts_the_workers_of_several_hosts(tmp_path: Path) -> None:
    """Two hosts on this machine, two workers each, of which the last fails."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "folder, end = pathlib.Path(sys.argv[1]), time.monotonic() + 100\n"
        "(folder / os.environ['RANK']).write_text(os.environ['MINE'])\n"
        "while not all((folder / rank).exists() for rank in '0123') and time.monotonic() < end:\n"
        "    time.sleep(0.05)\n"
        "sys.exit(5 if os.environ['RANK'] == '3' else 0)\n"
    )
    launcher = (
        "import sys\n"
        "from matcha.distributed.launch.launcher import Hosts, launch\n"
        "from matcha.errors import WorkerError\n"
        "script, folder, meeting, host = sys.argv[1:]\n"
        "hosts = Hosts(number=2, rendezvous=meeting, rank=int(host))\n"
        "try:\n"
        "    launch([script, folder], 4, environment={'MINE': 'x'}, hosts=hosts)\n"
        "except WorkerError as error:\n"
        "    sys.exit(error.exit_code)\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-c", launcher, str(script), str(tmp_path), meeting]
    hosts = [subprocess.Popen([*command, host], stderr=subprocess.DEVNULL) for host in "01"]
    try:
        assert hosts[1].wait(200) == 5
    finally:  # torchrun on the other host would wait minutes for the one that has failed
        for host in hosts:
            host.kill()
            host.wait()
    assert [(tmp_path / rank).read_text() for rank in "0123"] == ["x"] * 4
