from __future__ import annotations

import numpy as np
import pytest

from matcha.rounds import Round

MATCHINGS = (((0, 1), (2, 3)), ((1, 2),))


def make(mixing, weight, matchings=MATCHINGS):
    indices = tuple(range(len(matchings)))
    return Round(matchings=matchings, indices=indices, mixing=mixing, weight=weight)


def test_laplacian_mixing_is_identity_minus_alpha_laplacian():
    laplacian = np.array([[1, -1, 0, 0], [-1, 2, -1, 0], [0, -1, 2, -1], [0, 0, -1, 1.0]])
    matrix = make("laplacian", 0.3).matrix(4)
    np.testing.assert_allclose(matrix, np.eye(4) - 0.3 * laplacian, atol=1e-15)


def test_pairwise_mixing_is_a_product_in_order_of_exchange():
    first, second = (make("pairwise", 0.5, (m,)).matrix(4) for m in MATCHINGS)
    np.testing.assert_array_equal(make("pairwise", 0.5).matrix(4), second @ first)


@pytest.mark.parametrize("mixing", ["laplacian", "pairwise"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_mixing_keeps_the_mean_the_type_and_its_input(mixing, dtype):
    x = np.random.default_rng(0).normal(size=(4, 7)).astype(dtype)
    before = x.copy()
    mixed = make(mixing, 0.5).mix(x)
    assert mixed.dtype == dtype
    np.testing.assert_array_equal(x, before)
    np.testing.assert_allclose(mixed.mean(axis=0), x.mean(axis=0), atol=1e-6)


def test_both_ends_of_an_even_pair_get_the_same_bits():
    x = np.random.default_rng(1).normal(size=(4, 1000))
    mixed = make("pairwise", 0.5, (MATCHINGS[0],)).mix(x)
    np.testing.assert_array_equal(mixed[0], mixed[1])


def test_partners_and_links():
    round_ = make("laplacian", 0.1)
    assert round_.partners(1) == (0, 2)
    assert round_.partners(3) == (2, None)
    assert round_.links == ((0, 1), (2, 3), (1, 2))
    assert round_
    assert not make("laplacian", 0.1, ())
