"""Every pair of what a Gossip offers trains with the right average and resumes exactly, or is
refused by the table of exclusions; and the triples that users would choose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.distributed import crossings
from tests.distributed.links.linked import run_linked

from matcha.testing import run_threads

ALONE = crossings.all_combinations(mesh=False)


@pytest.mark.parametrize("combination", ALONE, ids="+".join)
def test_a_crossing_trains_and_resumes_or_is_refused(
    combination: crossings.Combination, tmp_path: Path
) -> None:
    def work(transport: Any) -> Any:
        way = {"transport": transport}
        return crossings.run_worker(transport.rank, combination, tmp_path, way)

    if "continue" in combination:  # only links know who is gone
        found = run_linked(crossings.make_plan().topology, work)
    else:
        found = run_threads(crossings.NUM_WORKERS, work)
    crossings.check(combination, found)


@pytest.mark.slow
def test_groups_of_processes_train_and_resume_or_are_refused(workers: Any, tmp_path: Path) -> None:
    """Every combination with `mesh`, by six processes that are three workers."""
    workers.run("crossings.py", str(tmp_path), num_workers=1, timeout=280)
    found = crossings.load(tmp_path)
    trained = 0
    for combination in crossings.all_combinations(mesh=True):
        results = [one[combination] for one in found]
        for part in range(crossings.GROUP):
            counterparts = results[part :: crossings.GROUP]
            trained += crossings.check(combination, counterparts)
    assert trained > 10 * crossings.GROUP
