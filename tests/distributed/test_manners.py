from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.distributed import manners

from matcha.distributed import run_threads


def joined() -> tuple[np.ndarray, list[int]]:
    """What `manners.join` must give: a link rests once its ends have met after both finished."""
    x = np.ones((3, 3))
    closed: set[tuple[int, int]] = set()
    steps = manners.STEPS
    ends = [0, 0, 0]
    for k in range(1000):
        running = [k < s for s in steps]
        for i in range(3):
            if running[i]:
                x[i] -= 0.1 * 2 * (x[i] - i)
        round = manners.PLAN.round(k)
        before = x.copy()
        for matching in round.matchings:
            for i, j in matching:
                if (i, j) not in closed:
                    x[i] += round.weight * (before[j] - before[i])
                    x[j] += round.weight * (before[i] - before[j])
        for i, j in round.links:
            if not running[i] and not running[j]:
                closed.add((i, j))
        for i in range(3):
            if running[i] or any(i in link and link not in closed for link in LINKS):
                ends[i] = k + 1
    return x, ends


LINKS = manners.PLAN.topology.links


def test_workers_with_less_data_answer_until_the_others_finish() -> None:
    expected, _ = joined()
    results = run_threads(3, manners.join)
    found = np.concatenate([weights.numpy() for weights, _ in results])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    assert all(iteration >= max(manners.STEPS) for _, iteration in results)


def test_joining_goes_with_overlap() -> None:
    results = run_threads(3, lambda transport: manners.join(transport, overlap=True))
    assert all(iteration >= max(manners.STEPS) for _, iteration in results)
    # Mixing keeps the sum, so only the workers' own steps have moved it.
    assert torch.isfinite(torch.stack([weights for weights, _ in results])).all()


@pytest.mark.slow
def test_all_of_it_between_processes(workers, tmp_path: Path) -> None:
    workers.run("manners.py", str(tmp_path), num_workers=3, timeout=200)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(3)]
    expected, _ = joined()
    weights = np.concatenate([result["join"].numpy() for result in found])
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-12)
    assert [result["away"] for result in found] == [9, 9, 9]
    assert all("DistributedDataParallel" in result["wrap"] for result in found)
    assert any("is in averaged() at iteration 3" in result["alone"] for result in found), found
    assert any("finished at iteration 5" in result["early"] for result in found), found
