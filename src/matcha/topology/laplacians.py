"""The Laplacian of some links."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


def laplacian(
    links: Iterable[tuple[int, int]], num_workers: int, weights: Sequence[float] | None = None
) -> Any:
    """The Laplacian of some links among `num_workers` workers, as a sparse CSR matrix.

    >>> laplacian([(0, 1)], 3).toarray().tolist()
    [[1.0, -1.0, 0.0], [-1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    """
    from scipy.sparse import coo_array

    ends = np.array(list(links), dtype=np.int64).reshape(-1, 2)
    i, j = ends.T
    ones = np.ones(len(ends)) if weights is None else np.asarray(weights, dtype=np.float64)
    rows, columns = np.concatenate([i, j, i, j]), np.concatenate([j, i, i, j])
    values = np.concatenate([-ones, -ones, ones, ones])
    return coo_array((values, (rows, columns)), shape=(num_workers, num_workers)).tocsr()
