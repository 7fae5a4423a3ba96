"""The shaped network of benchmarks/network: real namespaces, none of which outlives its test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.signals import hear_ctrl_c

from matcha import Topology, families
from matcha.errors import MatchaError

FOLDER = Path(__file__).parents[2] / "benchmarks" / "network"
sys.path.insert(0, str(FOLDER))
import namespaces  # noqa: E402

try:
    namespaces.check_possible()
    impossible = None
except MatchaError as error:
    impossible = str(error)
needs_network = pytest.mark.skipif(impossible is not None, reason=str(impossible))


@pytest.fixture
def none_left() -> Iterator[None]:
    before = set(namespaces.leftovers())
    yield
    assert set(namespaces.leftovers()) <= before


@needs_network
@pytest.mark.usefixtures("none_left")
def test_hosts_reach_one_another_and_are_taken_down() -> None:
    script = (
        "import os, socket, sys\n"
        "port = 29123\n"
        "if os.environ['RANK'] == '0':\n"
        "    server = socket.create_server((os.environ['MASTER_ADDR'], port))\n"
        "    for _ in range(2): server.accept()[0].sendall(b'hello')\n"
        "else:\n"
        "    import time\n"
        "    for _ in range(200):\n"
        "        try: link = socket.create_connection((os.environ['MASTER_ADDR'], port)); break\n"
        "        except OSError: time.sleep(0.05)\n"
        "    sys.exit(link.recv(5) != b'hello')\n"
    )
    with namespaces.Network(families.ring(3), mbps=50) as network:
        assert network.run([sys.executable, "-c", script], timeout=60) == [0, 0, 0]
        names = namespaces.leftovers()
        assert all(network.host(rank) in names for rank in range(3))


@needs_network
@pytest.mark.usefixtures("none_left")
def test_an_error_inside_takes_the_network_down() -> None:
    started = []

    def fail() -> None:
        with namespaces.Network(families.path(2)) as network:
            started.append(network.start(0, ["sleep", "600"]))
            raise RuntimeError("oops")

    with pytest.raises(RuntimeError, match="oops"):
        fail()
    assert started[0].poll() is not None


@needs_network
@pytest.mark.usefixtures("none_left")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_takes_the_network_down(number, code, request) -> None:
    command = [sys.executable, str(FOLDER / "run.py"), "ring:3", "--mbps", "100", "--"]
    run = subprocess.Popen(
        [*command, "sleep", "600"], stderr=subprocess.DEVNULL, preexec_fn=hear_ctrl_c
    )
    request.addfinalizer(run.terminate)  # whatever happens below, nothing stays
    prefix = f"{namespaces.PREFIX}{run.pid}"
    end = time.monotonic() + 60
    while not _has_processes(f"{prefix}-2"):
        assert time.monotonic() < end, "the network was not built"
        time.sleep(0.05)
    run.send_signal(number)
    assert run.wait(60) == code
    assert not [name for name in namespaces.leftovers() if name.startswith(prefix)]


def _has_processes(namespace: str) -> bool:
    if namespace not in namespaces.leftovers():
        return False
    found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, check=False)
    return bool(found.stdout.strip())


@needs_network
@pytest.mark.slow
@pytest.mark.usefixtures("none_left")
def test_a_probe_finds_the_slow_wire(tmp_path: Path) -> None:
    # 400 kB in 16, 32 and 160 ms: 200, 100 and 20 Mbit/s.
    ideal = (0.016, 0.032, 0.16)
    topology = families.ring(3).with_link_times(ideal)
    output = tmp_path / "measured.json"
    command = [sys.executable, "-m", "matcha.cli", "probe", "ring:3", "--message-mb", "0.4"]
    with namespaces.Network(topology, message_bytes=400_000) as network:
        codes = network.run([*command, "--output", str(output)], timeout=120)
    assert codes == [0, 0, 0]
    measured = Topology.read(output).link_times
    # Shaping cannot be outrun, but for the bucket's first burst; a busy machine may be slower.
    assert all(found > 0.6 * time for found, time in zip(measured, ideal, strict=True))
    assert measured.index(max(measured)) == 2


def test_where_it_cannot_be_had_it_says_why(monkeypatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(MatchaError, match="needs root"):
        namespaces.Network(families.ring(3))
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(MatchaError, match="needs Linux"):
        namespaces.Network(families.ring(3))
