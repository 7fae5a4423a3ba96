from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.commands import matcha_command, matcha_fork

from matcha import Topology


@pytest.mark.slow
def test_the_command_writes_link_times_once(tmp_path: Path) -> None:
    output = tmp_path / "network.json"
    arguments = ("probe", "ring:3", "-o", output, "--message-mb", "0.1", "--repetitions", "2")
    done = matcha_fork(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    measured = Topology.read(output)
    times = measured.link_times
    assert measured.link_latencies == tuple(row["latency"] for row in printed)
    assert times == tuple(row["seconds"] for row in printed)
    assert all(time > 0 for time in times)
    again = matcha_command(*arguments)
    assert again.returncode == 2
    assert "exists: choose another name, or --force to overwrite it" in again.stderr
    forced = matcha_fork(*arguments, "--force")
    assert forced.returncode == 0, forced.stderr
