from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.distributed import groups


@pytest.mark.slow
@pytest.mark.parametrize("num_nodes", [2, 4])
def test_groups_of_processes_equal_workers_with_the_groups_batch(
    workers, tmp_path: Path, num_nodes: int
) -> None:
    count = num_nodes * groups.GPUS
    workers.run("groups.py", str(num_nodes), str(tmp_path), num_workers=count, timeout=250)
    results = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(count)]
    kinds = groups.KINDS[num_nodes]
    for kind in kinds:
        expected = groups.expected(kind, num_nodes)
        centre = expected.mean(0)
        distance = np.square(expected - centre).sum(1).mean()
        for rank, result in enumerate(results):
            found, node = result[kind], rank // groups.GPUS
            np.testing.assert_allclose(found["x"], expected[node], rtol=0, atol=1e-10, err_msg=kind)
            np.testing.assert_allclose(found["average"], centre, rtol=0, atol=1e-10, err_msg=kind)
            assert found["distance"] == pytest.approx(distance, rel=1e-9, abs=1e-18), kind
    # 7·5 + 7 + 7 + 1 = 50 values. Rows are dealt out: the first process has 4 of 7 and all of 1.
    size = {kind: [r[kind]["bytes"] / 8 for r in results[: groups.GPUS]] for kind in kinds}
    assert all(50 <= values <= 50 + 4 * 8 for values in size["ddp"])  # places are aligned
    assert 4 * 5 + 4 + 7 + 1 <= size["fsdp"][0] <= 32 + 4 * 8
    assert 3 * 5 + 3 <= size["fsdp"][1] <= 18 + 2 * 8  # nothing of the second layer
    for result in results:
        sharded, dimensions = result["misuse"]
        assert "spread over several processes" in sharded
        assert "mesh['node']" in sharded
        assert "mesh= has 2 dimensions" in dimensions
