"""Eigenpairs by every road agree with dense algebra."""

import numpy as np
import pytest

from matcha import families
from matcha._numerics.spectra import (
    is_narrow,
    laplacian,
    lowest_eigenpairs,
    orthonormal,
    perpendicular_basis,
    start_vector,
)

NARROW = [families.torus(18, 18), families.path(400), families.geometric(400, 0.1, seed=1)]
WIDE = [families.erdos_renyi(400, 0.03, seed=1), families.star(300)]


@pytest.mark.parametrize("topology", NARROW, ids=lambda t: t.name)
def test_graphs_with_small_separators_are_narrow(topology):
    assert is_narrow(topology.link_array, topology.num_workers)


@pytest.mark.parametrize("topology", WIDE, ids=lambda t: t.name)
def test_expanders_are_not(topology):
    assert not is_narrow(topology.link_array, topology.num_workers)


@pytest.mark.parametrize("topology", [*NARROW, *WIDE], ids=lambda t: t.name)
def test_lowest_eigenpairs(topology):
    m = topology.num_workers
    weights = 0.2 + np.random.default_rng(0).random(len(topology.links))
    L = laplacian(topology.link_array, m, weights)
    values, vectors = lowest_eigenpairs(
        L, 5, narrow=is_narrow(topology.link_array, m), start=start_vector(m, 0)
    )
    np.testing.assert_allclose(values, np.linalg.eigvalsh(L.toarray())[1:6], rtol=1e-7)
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(5), atol=1e-10)
    np.testing.assert_allclose(vectors.sum(axis=0), 0.0, atol=1e-9)


def test_bases_are_orthonormal_and_perpendicular_to_ones():
    for Q in (perpendicular_basis(7), orthonormal(np.random.default_rng(0).random((7, 4)))):
        np.testing.assert_allclose(Q.T @ Q, np.eye(Q.shape[1]), atol=1e-12)
        np.testing.assert_allclose(Q.sum(axis=0), 0.0, atol=1e-12)


def test_dependent_columns_are_dropped():
    x = np.arange(5.0)
    assert orthonormal(np.stack([x, 2 * x, np.ones(5)], axis=1)).shape == (5, 1)
