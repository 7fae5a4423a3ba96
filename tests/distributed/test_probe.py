from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.commands import matcha_command

from matcha import Topology, families
from matcha.distributed import SlowLinks, run_threads
from matcha.distributed.probe import probe
from matcha.errors import InputError


def test_every_link_is_measured_and_all_workers_hear_of_it() -> None:
    ring = families.ring(5)

    def work(transport):
        # 100 kB at 40 Mbit/s take 20 ms; a matching's links are measured at once.
        return probe(ring, SlowLinks(transport, 40), message_bytes=100_000, repetitions=3)

    measures, *others = run_threads(5, work)
    assert all(other == measures for other in others)
    assert [measure.link for measure in measures] == list(ring.links)
    for measure in measures:
        assert measure.seconds >= 0.02 > measure.latency
        assert 0 < measure.mbps <= 42


def test_another_number_of_workers_is_refused() -> None:
    with pytest.raises(InputError, match="has 5 workers, but 2 were started"):
        run_threads(2, lambda transport: probe(families.ring(5), transport))


@pytest.mark.slow
def test_the_command_writes_link_times_once(tmp_path: Path) -> None:
    output = tmp_path / "network.json"
    arguments = ("probe", "ring:3", "-o", output, "--message-mb", "0.1", "--repetitions", "2")
    done = matcha_command(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    times = Topology.read(output).link_times
    assert times == tuple(row["seconds"] for row in printed)
    assert all(time > 0 for time in times)
    again = matcha_command(*arguments)
    assert again.returncode == 2
    assert "exists" in again.stderr
