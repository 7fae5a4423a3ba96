from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from matcha.rounds import PushSum, Round

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


# -- messages that go one way ---------------------------------------------------------------------


def test_push_is_column_stochastic_and_keeps_shares_in_circles():
    ring = make("push", 0.5, (((0, 1), (1, 2), (2, 0)),))
    np.testing.assert_allclose(ring.matrix(4).sum(axis=0), 1)
    np.testing.assert_allclose(ring.matrix(4).sum(axis=1), 1)
    assert ring.keeps_shares
    path = make("push", 0.5, (((0, 1), (1, 2)),))
    np.testing.assert_allclose(path.matrix(3).sum(axis=0), 1)
    assert not path.keeps_shares
    assert path.one_way_roles(1)[0] == (2, 0.5, 0, 0.5)
    assert path.one_way_roles(0)[0] == (1, 0.5, None, 0.0)
    unequal = Round(
        matchings=ring.matchings,
        indices=(0,),
        mixing="push",
        weight=0.5,
        weights=((0.5, 0.4, 0.5),),
    )
    assert not unequal.keeps_shares


def test_weights_of_links_replace_the_weight_of_the_round():
    even = Round(
        matchings=MATCHINGS,
        indices=(0, 1),
        mixing="pairwise",
        weight=0.9,
        weights=((0.5, 0.5), (0.5,)),
    )
    np.testing.assert_array_equal(even.matrix(4), make("pairwise", 0.5).matrix(4))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), num_workers=st.integers(2, 9))
def test_push_sum_finds_the_true_average_on_any_strongly_connected_digraph(seed, num_workers):
    rng = np.random.default_rng(seed)
    order = rng.permutation(num_workers)
    arrows = {(int(a), int(b)) for a, b in zip(order, np.roll(order, 1), strict=True)}
    extra = rng.integers(0, num_workers, size=(num_workers, 2))
    arrows |= {(int(a), int(b)) for a, b in extra if a != b}
    values = rng.normal(size=(num_workers, 3))
    state, z = PushSum(values), values
    for _ in range(4000):
        senders, receivers, chosen = set(), set(), []
        for i, j in rng.permutation(sorted(arrows)):
            if i not in senders and j not in receivers and rng.random() < 0.7:
                chosen.append((int(i), int(j)))
                senders.add(i)
                receivers.add(j)
        if chosen:
            z = state.mix(make("push", 0.5, (tuple(chosen),)), z)
            # Mass is conserved, of the values and of the weights.
            np.testing.assert_allclose(state.x.sum(0), values.sum(0), atol=1e-12)
            assert abs(state.omega.sum() - num_workers) < 1e-12
        if np.abs(z - values.mean(0)).max() < 1e-11:
            break
    np.testing.assert_allclose(z, np.broadcast_to(values.mean(0), z.shape), atol=1e-10)
