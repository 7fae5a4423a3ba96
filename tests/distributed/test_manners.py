from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.distributed import manners

from matcha.distributed import Gossip, MemoryTransport, run_threads
from matcha.errors import ExchangeError


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


def test_a_worker_that_finished_early_is_not_called_dead() -> None:
    errors = run_threads(3, manners.finish_early)
    assert errors[0] == ""
    assert any("finished at iteration 5" in e and "gossip.join()" in e for e in errors[1:])


def test_who_is_away_is_waited_for_beyond_the_deadline() -> None:
    assert run_threads(3, manners.away) == [9, 9, 9]


def test_a_call_that_one_worker_makes_alone_is_named() -> None:
    errors = run_threads(3, manners.average_alone)
    assert any("is in averaged() at iteration 3" in error for error in errors), errors
    assert any("is in the round of iteration" in error for error in errors), errors


def test_different_calls_at_the_same_time_are_named() -> None:
    def work(transport: MemoryTransport) -> str:
        model, optimizer = manners.make()
        gossip = Gossip(model, optimizer, manners.PLAN, transport=transport, deadline=20)
        call = gossip.consensus_distance if transport.rank else gossip.averaged_model
        with pytest.raises(ExchangeError) as caught:
            call()
        return str(caught.value)

    for error in run_threads(3, work):
        assert "consensus_distance() at iteration 0" in error
        assert "averaged() at iteration 0" in error


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
