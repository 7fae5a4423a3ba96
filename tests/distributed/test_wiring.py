"""Gossip over coded wires, against the definition."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.distributed import wire_cases

from matcha.distributed import Gossip, run_threads


@pytest.mark.parametrize("wire", wire_cases.WIRES)
@pytest.mark.parametrize(("strategy", "mixing"), wire_cases.STRATEGIES)
def test_gossip_in_memory_is_the_definition(strategy, mixing, wire) -> None:
    plan = wire_cases.wired(strategy, mixing, wire, 4)
    for rule in ("eq2", "footnote"):
        results = run_threads(4, lambda t, rule=rule: wire_cases.train(t, plan, rule))
        wire_cases.check(np.stack(results), plan, rule)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gloo", "mpi"])
def test_gossip_between_processes_is_the_definition(kind, workers, tmp_path) -> None:
    if kind == "mpi":
        pytest.importorskip("mpi4py")
        wire_cases.run_mpi(tmp_path)
    else:
        workers.run("wire_cases.py", "gloo", str(tmp_path), num_workers=wire_cases.PROCESSES)
    wire_cases.check_folder(tmp_path)


@pytest.mark.parametrize("wire", ["modulo:3", "lowrank:2"])
@pytest.mark.parametrize("momentum", ["quasi-global", "outer", "tracking"])
def test_resuming_is_exact(wire, momentum, tmp_path: Path) -> None:
    plan = wire_cases.wired("greedy", "pairwise", wire, 4)

    def work(transport) -> bool:
        ends = []
        for name in ("whole", "halves"):
            model, optimizer = wire_cases.worker(transport.rank)
            options = {"transport": transport, "momentum": momentum, "bucket_mb": 0.002}
            gossip = Gossip(model, optimizer, plan, **options)
            for k in range(12):
                if name == "halves" and k == 6:
                    gossip.save(tmp_path / f"{wire[0]}{momentum}")
                    gossip.detach()
                    model, optimizer = wire_cases.worker(transport.rank)
                    gossip = Gossip(model, optimizer, plan, **options)
                    gossip.load(tmp_path / f"{wire[0]}{momentum}")
                wire_cases.step(model, optimizer)
            gossip.detach()
            ends.append(model.flat())
        return bool(np.array_equal(*ends))

    assert all(run_threads(4, work))
