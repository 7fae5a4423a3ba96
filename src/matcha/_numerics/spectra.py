"""Extreme eigenpairs of weighted graph Laplacians, from eight workers to tens of thousands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Operator = Callable[[Array], Array]

DENSE_LIMIT = 200
"""Up to this many workers all eigenvectors together cost less than a few of them."""


def laplacian(
    links: Iterable[tuple[int, int]] | Indices,
    num_workers: int,
    weights: Sequence[float] | Array | None = None,
) -> Any:
    """The Laplacian Σ_l w_l (e_i − e_j)(e_i − e_j)ᵀ of some links, as a sparse CSR matrix.

    >>> laplacian([(0, 1)], 2, [0.5]).toarray().tolist()
    [[0.5, -0.5], [-0.5, 0.5]]
    """
    from scipy.sparse import coo_array

    ends = links if isinstance(links, np.ndarray) else list(links)
    i, j = np.asarray(ends, dtype=np.int64).reshape(-1, 2).T
    w = np.ones(len(i)) if weights is None else np.asarray(weights, dtype=np.float64)
    rows, columns = np.concatenate([i, j, i, j]), np.concatenate([j, i, i, j])
    values = np.concatenate([-w, -w, w, w])
    return coo_array((values, (rows, columns)), shape=(num_workers, num_workers)).tocsr()


def is_narrow(links: Indices, num_workers: int) -> bool:
    """Whether breadth-first levels stay thin, so that a sparse factorisation stays sparse.

    Geometric graphs, grids, rings and trees are narrow; expanders are not: half of their workers
    sit in one level.
    """
    from scipy.sparse.csgraph import breadth_first_order

    graph = laplacian(links, num_workers)
    order, parents = breadth_first_order(graph, 0, directed=False)
    # A second search from the last worker reached runs along the graph's long side.
    order, parents = breadth_first_order(graph, order[-1], directed=False)
    level = np.zeros(num_workers, dtype=np.int64)
    for worker in order[1:]:
        level[worker] = level[parents[worker]] + 1
    return bool(np.bincount(level).max() <= 6.0 * np.sqrt(num_workers))


def lowest_eigenpairs(
    matrix: Any, count: int, *, narrow: bool, start: Array, tolerance: float = 1e-6
) -> tuple[Array, Array]:
    """The smallest eigenvalues of a Laplacian, ascending from λ₂, and their orthonormal vectors.

    The graph is connected, and the vector of ones is left out. `narrow` (see `is_narrow`) says
    whether to factorise or to use products alone; the `start` of the iteration decides nothing but
    the digits beyond the tolerance, which is of the eigenvectors' residuals.
    """
    m = matrix.shape[0]
    count = min(count, m - 1)
    if m <= DENSE_LIMIT or 3 * count >= m:
        return dense_eigenpairs(matrix, count)
    if narrow:
        inverse = _pseudo_inverse(matrix)
        _, vectors = _lanczos(inverse, m, count, start, tolerance)
    else:
        # Ones become the eigenvector of the largest eigenvalue, far from the wanted end.
        away = 2.0 * matrix.diagonal().max()
        _, vectors = _lanczos(
            lambda x: away * (x - x.mean()) - matrix @ x, m, count, start, tolerance
        )
    # The best pairs within the subspace that was found.
    Q = orthonormal(vectors)
    values, mix = np.linalg.eigh(Q.T @ (matrix @ Q))
    return values, Q @ mix


def dense_eigenpairs(matrix: Any, count: int) -> tuple[Array, Array]:
    """Compute `lowest_eigenpairs` by a dense decomposition."""
    dense = matrix.toarray()
    m = len(dense)
    dense += (2.0 * dense.diagonal().max() + 1.0) / m
    if 8 * count < m:
        from scipy.linalg import eigh

        values, vectors = eigh(dense, subset_by_index=[0, count - 1])
        return values, vectors
    values, vectors = np.linalg.eigh(dense)
    return values[:count], vectors[:, :count]


def top_eigenpairs(
    operator: Operator, num_workers: int, count: int, start: Array, tolerance: float
) -> tuple[Array, Array]:
    """The largest eigenvalues of a symmetric operator, in descending order, and their vectors."""
    values, vectors = _lanczos(operator, num_workers, count, start, tolerance)
    order = np.argsort(-values)
    return values[order], vectors[:, order]


def orthonormal(vectors: Array) -> Array:
    """An orthonormal basis, perpendicular to ones, of the span of some columns."""
    vectors = vectors - vectors.mean(axis=0)
    Q, scales, _ = np.linalg.svd(vectors, full_matrices=False)
    Q = Q[:, scales > 1e-7 * max(scales[0], 1e-300)]
    return np.asarray(Q - Q.mean(axis=0))


def perpendicular_basis(num_workers: int) -> Array:
    """Orthonormal columns that span everything perpendicular to ones.

    Householder's reflection that takes the vector of ones to the first axis, less its first column.
    """
    u = np.full(num_workers, 1.0 / np.sqrt(num_workers))
    u[0] += 1.0
    return np.asarray(np.eye(num_workers)[:, 1:] - np.outer(u, u[1:]) * (2.0 / (u @ u)))


def start_vector(num_workers: int, seed: int) -> Array:
    """A fixed start for the iterations: the same seed gives the same plan on every machine."""
    x = np.random.default_rng(seed).standard_normal(num_workers)
    return np.asarray(x - x.mean())


def _lanczos(
    operator: Operator, m: int, count: int, start: Array, tolerance: float
) -> tuple[Array, Array]:
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

    wrapped = LinearOperator((m, m), matvec=operator, dtype=np.float64)
    ncv = min(m - 1, max(3 * count, count + 30))
    try:
        values, vectors = eigsh(
            wrapped, k=count, which="LA", v0=start, ncv=ncv, tol=tolerance, maxiter=200
        )
    except ArpackNoConvergence as stopped:
        # What has converged is exact; the rest is found in the next iteration of the caller.
        values, vectors = stopped.eigenvalues, stopped.eigenvectors
        if len(values) == 0:
            return _lanczos(operator, m, max(1, count // 2), start, tolerance * 100.0)
    return values, vectors


def _pseudo_inverse(matrix: Any) -> Operator:
    """Solve L x = b for b perpendicular to ones: ground one worker, factorise the rest."""
    from scipy.sparse.linalg import splu

    m = matrix.shape[0]
    ground = int(matrix.diagonal().argmax())
    rest = np.delete(np.arange(m), ground)
    factor = splu(
        matrix[rest][:, rest].tocsc(),
        permc_spec="MMD_AT_PLUS_A",
        diag_pivot_thresh=0.0,
        options={"SymmetricMode": True},
    )

    def apply(b: Array) -> Array:
        x = np.zeros(m)
        x[rest] = factor.solve(b[rest] - b.mean())
        return np.asarray(x - x.mean())

    return apply
