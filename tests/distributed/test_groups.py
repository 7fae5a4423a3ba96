from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.distributed import groups


@pytest.mark.slow
def test_groups_of_processes_equal_workers_with_the_groups_batch(workers, tmp_path: Path) -> None:
    workers.run("groups.py", str(tmp_path), num_workers=1, timeout=280)
    for num_nodes in groups.KINDS:
        check(num_nodes, tmp_path / str(num_nodes))


def check(num_nodes: int, folder: Path) -> None:
    count = num_nodes * groups.GPUS
    results = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(count)]
    kinds = groups.KINDS[num_nodes]
    for kind in kinds:
        expected = groups.expected(kind, num_nodes)
        centre = expected.mean(0)
        distance = np.square(expected - centre).sum(1).mean()
        for rank, result in enumerate(results):
            found = result[kind]
            node = rank * groups.nodes_of(kind, num_nodes) // count
            np.testing.assert_allclose(found["x"], expected[node], rtol=0, atol=1e-10, err_msg=kind)
            np.testing.assert_allclose(found["average"], centre, rtol=0, atol=1e-10, err_msg=kind)
            names = list(groups.make_model(kind).state_dict())
            assert list(found["state"]) == names, kind  # and not `module.0.weight`
            state = torch.cat([found["state"][name].flatten() for name in names])
            np.testing.assert_allclose(state, centre, rtol=0, atol=1e-10, err_msg=kind)
            assert found["distance"] == pytest.approx(distance, rel=1e-9, abs=1e-18), kind
    # 7·5 + 7 + 7 + 1 = 50 values. Rows are dealt out: the first process has 4 of 7 and all of 1.
    size = {kind: [r[kind]["bytes"] / 8 for r in results[: groups.GPUS]] for kind in kinds}
    assert all(50 <= values <= 50 + 4 * 8 for values in size["ddp"])  # places are aligned
    if "fsdp" in kinds:
        assert 4 * 5 + 4 + 7 + 1 <= size["fsdp"][0] <= 32 + 4 * 8
        assert 3 * 5 + 3 <= size["fsdp"][1] <= 18 + 2 * 8  # nothing of the second layer
    if "hsdp" in kinds:  # copies of a shard send it like the shard itself
        assert size["hsdp"] == size["fsdp"]
        assert all(r["fsdp-tensor"]["bytes"] < 8 * (57 / 4 + 4 * 8) for r in results)
    for result in results:
        sharded, dimensions = result["misuse"]
        assert "spread over several processes" in sharded
        assert "mesh['node']" in sharded
        assert "mesh= has 2 dimensions" in dimensions
