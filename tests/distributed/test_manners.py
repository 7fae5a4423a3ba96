from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.distributed import manners
from tests.distributed.links.linked import run_linked

from matcha import Plan, families
from matcha.distributed import Gossip
from matcha.errors import InputError
from matcha.testing import run_threads

MPIRUN = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")


def joined(plan: Plan = manners.PLAN) -> np.ndarray:
    """What `manners.join` must give: a link rests once its ends have met after both finished."""
    m = plan.num_workers
    x = np.ones((m, 3))
    closed: set[tuple[int, int]] = set()
    for k in range(1000):
        running = [k < s for s in manners.STEPS[:m]]
        for i in range(m):
            if running[i]:
                x[i] -= 0.1 * 2 * (x[i] - i)
        round = plan.round(k)
        before = x.copy()
        for matching in round.matchings:
            for i, j in matching:
                if (i, j) not in closed:
                    x[i] += round.weight * (before[j] - before[i])
                    x[j] += round.weight * (before[i] - before[j])
        closed |= {(i, j) for i, j in round.links if not running[i] and not running[j]}
    return x


def test_workers_with_less_data_answer_until_the_others_finish() -> None:
    expected = joined()
    results = run_threads(3, manners.join)
    found = np.concatenate([weights.numpy() for weights, _ in results])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    assert all(iteration == max(manners.STEPS) for _, iteration in results)


def test_joining_goes_over_links_of_our_own() -> None:
    results = run_linked(manners.PLAN.topology, manners.join)
    found = np.concatenate([weights.numpy() for weights, _ in results])
    np.testing.assert_allclose(found, joined(), rtol=0, atol=1e-12)


def test_joining_is_refused_where_others_go_on_anyway() -> None:
    def work(transport):
        model, optimizer = manners.make()
        options = {"transport": transport, "timeout": 150, "on_loss": "continue"}
        with (
            Gossip(model, optimizer, manners.make_plan(2), **options) as gossip,
            pytest.raises(InputError, match=r"join\(\) does not go with on_loss=\"continue\""),
            gossip.join(),
        ):
            pass
        return True

    assert run_linked(manners.make_plan(2).topology, work) == [True, True]


def test_who_is_away_is_waited_for_over_links_of_our_own() -> None:
    said = run_linked(families.path(3), manners.away_from_a_message)
    assert said[1] == "rank 0 did not answer within 1 s."


@pytest.mark.long("MPI; test_all_of_it_between_processes does the same over gloo")
@pytest.mark.skipif(MPIRUN is None, reason="needs mpirun (pip install mpich)")
def test_joining_and_being_away_under_mpi(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py", reason="needs the extra `mpi`")
    command = [MPIRUN, "-n", "2", sys.executable, manners.__file__, str(tmp_path), "mpi"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    weights = np.concatenate([result["join"].numpy() for result in found])
    np.testing.assert_allclose(weights, joined(manners.make_plan(2)), rtol=0, atol=1e-12)
    assert found[1]["away"] == "rank 0 did not answer within 1 s."
    assert "finished at iteration 5" in found[1]["early"]


def test_joining_goes_with_overlap() -> None:
    results = run_threads(3, lambda transport: manners.join(transport, overlap=True))
    assert all(iteration == max(manners.STEPS) for _, iteration in results)
    # Mixing keeps the sum, so only the workers' own steps have moved it.
    assert torch.isfinite(torch.stack([weights for weights, _ in results])).all()


@pytest.mark.slow
def test_all_of_it_between_processes(workers, tmp_path: Path) -> None:
    workers.run("manners.py", str(tmp_path), num_workers=3, timeout=200)
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(3)]
    expected = joined()
    weights = np.concatenate([result["join"].numpy() for result in found])
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-12)
    assert [result["away"] for result in found] == [9, 9, 9]
    assert all("DistributedDataParallel" in result["wrap"] for result in found)
    assert any("is in averaged() at iteration 3" in result["alone"] for result in found), found
    assert any("finished at iteration 5" in result["early"] for result in found), found
