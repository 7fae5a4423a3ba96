"""Gossip over coded wires, against the definition."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.distributed import wire_cases
from tests.wires.definition import Definition

from matcha import Plan
from matcha.distributed import Gossip
from matcha.testing import run_threads

LENGTHS = (4, 7, 4, 12)
"""How many steps each of four workers has data for."""


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
@pytest.mark.parametrize("momentum", ["quasi-global", "outer", "tracking", "shared"])
def test_resuming_is_exact(wire, momentum, tmp_path: Path) -> None:
    plan = wire_cases.wired("greedy", "pairwise", wire, 4)

    def work(transport) -> bool:
        ends = []
        for name in ("whole", "halves"):
            model, optimizer = wire_cases.worker(transport.rank)
            options = {"transport": transport, "momentum": momentum, "bucket_cap_mb": 0.002}
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


def joined(plan: Plan) -> np.ndarray:
    """The definition's rounds: a link rests once its ends have met after both finished."""
    goals = np.stack([wire_cases.goal(rank) for rank in range(4)])
    x, memory = np.tile(wire_cases.goal(99), (4, 1)), np.zeros_like(goals)
    definition = Definition(plan.wire, wire_cases.SHAPES, x)
    closed: set[tuple[int, int]] = set()
    for k in range(200):
        running = np.array([k < length for length in LENGTHS])
        memory[running] = 0.9 * memory[running] + (x - goals)[running]
        x = x - wire_cases.RATE * memory * running[:, None]
        round = plan.round(k)
        matchings = [[link for link in m if link not in closed] for m in round.matchings]
        x = definition.mix(replace(round, matchings=tuple(map(tuple, matchings))), x)
        closed |= {link for link in round.links if not running[list(link)].any()}
    assert closed == set(plan.topology.links)
    return x


@pytest.mark.parametrize("wire", ["modulo:3", "lowrank:2"])
def test_who_has_finished_goes_on_answering(wire) -> None:
    """Unequal amounts of data over a coded wire: the last to train still meets everybody."""
    plan = wire_cases.wired("matcha", "laplacian", wire, 4)

    def work(transport) -> np.ndarray:
        model, optimizer = wire_cases.worker(transport.rank)
        options = {"transport": transport, "bucket_cap_mb": 0.003, "timeout": 150.0}
        gossip = Gossip(model, optimizer, plan, **options)
        with gossip, gossip.join():
            for _ in range(LENGTHS[transport.rank]):
                wire_cases.step(model, optimizer)
        return model.flat()

    found = np.stack(run_threads(4, work))
    np.testing.assert_allclose(found, joined(plan), rtol=0, atol=1e-10)
