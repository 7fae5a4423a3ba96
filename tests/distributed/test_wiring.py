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
def test_who_has_finished_goes_on_answering(wire) -> None:
    """Unequal amounts of data over a coded wire: the last to train still meets everybody."""
    plan = wire_cases.wired("matcha", "laplacian", wire, 4)
    lengths = [4, 7, 4, 12]

    def work(transport) -> tuple[np.ndarray, int, bool]:
        model, optimizer = wire_cases.worker(transport.rank)
        gossip = Gossip(model, optimizer, plan, transport=transport, deadline=150.0)
        with gossip, gossip.join():
            for _ in range(lengths[transport.rank]):
                wire_cases.step(model, optimizer)
            ended = gossip.iteration
        finished = gossip.exchange.finished_at == ended
        return model.flat(), gossip.iteration, finished

    found = run_threads(4, work)
    assert all(finished for _, _, finished in found)
    assert all(iteration >= max(lengths) for _, iteration, _ in found)
    rows = np.stack([row for row, _, _ in found])
    assert np.isfinite(rows).all()
    # They met after they had stopped: closer to one another than their goals are.
    apart = np.std([wire_cases.goal(rank) for rank in range(4)], axis=0).mean()
    assert np.std(rows, axis=0).mean() < apart / 2


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
