from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from matcha.errors import InputError
from matcha.zoo.data import partition


@given(
    labels=st.lists(st.integers(0, 4), min_size=12, max_size=80),
    num_workers=st.integers(1, 6),
    kind=st.sampled_from(["iid", "shards", "dirichlet"]),
    seed=st.integers(0, 100),
    concentration=st.sampled_from([0.05, 0.5, 100.0]),
)
# Some worker draws nothing here, and is given an example of another.
@example(labels=[0, 1, 2, 3, 4] * 6, num_workers=6, kind="dirichlet", seed=0, concentration=0.05)
def test_every_example_has_one_owner(labels, num_workers, kind, seed, concentration):
    labels = np.array(labels)
    parts = partition(labels, num_workers, kind, seed=seed, concentration=concentration)
    assert len(parts) == num_workers
    assert all(len(part) for part in parts)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    again = partition(labels, num_workers, kind, seed=seed, concentration=concentration)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


def test_iid_is_even_and_seeded():
    labels = np.zeros(103)
    parts = partition(labels, 4)
    assert {len(part) for part in parts} == {25, 26}
    assert not np.array_equal(parts[0], partition(labels, 4, seed=1)[0])


def test_shards_hold_few_classes():
    labels = np.repeat(np.arange(10), 40)
    for part in partition(labels, 10, "shards", shards_per_worker=2):
        assert len(set(labels[part])) <= 3


def test_concentration_decides_how_much_workers_differ():
    labels = np.repeat(np.arange(10), 200)

    def skew(concentration):
        parts = partition(labels, 5, "dirichlet", concentration=concentration)
        shares = [np.bincount(labels[part], minlength=10) / len(part) for part in parts]
        return np.std(shares)

    assert skew(0.1) > 3 * skew(100.0)


@pytest.mark.parametrize("concentration", [1.0, 0.1, 0.01])
@pytest.mark.parametrize("num_workers", [4, 16, 20])
def test_even_dirichlet_draws_leave_workers_equally_many(num_workers, concentration):
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 400))
    parts = partition(labels, num_workers, "dirichlet-even", concentration=concentration)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(4000))
    assert {len(part) for part in parts} == {4000 // num_workers}
    most = [np.bincount(labels[part]).max() / len(part) for part in parts]
    assert bool(np.mean(most) > 0.35) == (concentration < 1)


@pytest.mark.parametrize(
    ("labels", "workers", "choices"),
    [
        (np.zeros(3), 4, {}),
        (np.zeros(8), 4, {"kind": "shards", "shards_per_worker": 3}),
        (np.zeros(8), 4, {"kind": "dirichlet", "concentration": 0.0}),
        (np.zeros(8), 4, {"kind": "sorted"}),
    ],
)
def test_nonsense_is_refused(labels, workers, choices):
    with pytest.raises(InputError):
        partition(labels, workers, **choices)
