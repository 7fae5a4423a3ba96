from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.simulation.tasks import er8

from matcha.rounds import PushSum, Round
from matcha.simulation.mixing import ClippedMixing, PushMixing, matrices, mix_product, mix_rows


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(
    ("strategy", "mixing"),
    [
        ("matcha", "laplacian"),
        ("matcha", "pairwise"),
        ("vanilla", None),
        ("greedy", None),
        ("greedy", "push"),
    ],
)
def test_rows_mix_to_the_definitions_bits(strategy, mixing, dtype):
    plan = er8(strategy, 1.0 if strategy == "vanilla" else 0.4, mixing)
    x = np.random.default_rng(0).standard_normal((8, 33)).astype(dtype)
    for k in range(40):
        expected = plan.round(k).mix(x)
        mixed = torch.from_numpy(x.copy())
        mix_rows(mixed, plan.round(k))
        assert np.array_equal(mixed.numpy(), expected)
        x = expected


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
def test_product_agrees_with_the_definition(dtype, close):
    plan = er8("matcha", 0.5)
    rounds = [plan.round(k) for k in range(10)]
    stack = torch.from_numpy(matrices(rounds, 8)).to(dtype)
    x = torch.randn(8, 50, dtype=dtype, generator=torch.Generator().manual_seed(0))
    for round, matrix in zip(rounds, stack, strict=True):
        expected = round.mix(x.numpy())
        mix_product(x, matrix, torch.empty_like(x))
        np.testing.assert_allclose(x.numpy(), expected, rtol=close, atol=close)


def test_values_that_overflow_do_so_quietly():
    """A run that diverges says so by its loss; numpy's warnings would be errors here."""
    x = torch.tensor([[3e38], [-3e38], [torch.inf]])
    mix_rows(
        x, Round(matchings=(((0, 1),), ((1, 2),)), indices=(0, 1), mixing="laplacian", weight=1)
    )
    assert not torch.isfinite(x).any()


def test_push_sum_of_all_workers_is_the_definition():
    random = np.random.default_rng(0)
    x = random.normal(size=(5, 7))
    rows = torch.from_numpy(x.copy())
    mixing, state, z = PushMixing([rows]), PushSum(x), x
    paths = [(((0, 1), (1, 2)),), (((3, 0),), ((2, 4), (4, 3))), ()]
    rounds = [
        Round(matchings=some, indices=tuple(range(len(some))), mixing="push", weight=0.5)
        for some in paths
    ]
    mixing.fill(rounds * 10)
    for k in range(30):
        step = 0.1 * random.normal(size=x.shape)
        z = state.mix(rounds[k % 3], z + step)
        rows += torch.from_numpy(step)
        mixing.mix(k)
        np.testing.assert_allclose(rows.numpy(), z, rtol=0, atol=1e-10)
        np.testing.assert_allclose(mixing.omega.numpy()[:, 0], state.omega, atol=1e-12)
    assert abs(mixing.omega.sum() - 5) < 1e-12
    mixing.reset()
    np.testing.assert_array_equal(mixing.omega.numpy(), 1)
    np.testing.assert_array_equal(mixing.x[0], rows)


def test_pairs_keep_their_sum_and_move_no_further_than_allowed() -> None:
    rows = torch.zeros(4, 3, dtype=torch.float64)
    mixing = ClippedMixing([rows], allowance=1.0)
    rows[0, 0], rows[1, 1], rows[2, 2], rows[3, 0] = 1.0, 2.0, torch.nan, 5.0
    before = rows.clone()
    matchings = (((0, 1), (2, 3)),)
    mixing.fill([Round(matchings=matchings, indices=(0,), mixing="pairwise", weight=0.5)])
    mixing.mix(0)
    torch.testing.assert_close(rows[:2].sum(0), before[:2].sum(0))
    torch.testing.assert_close((rows[:2] - before[:2]).norm(dim=1), torch.full((2,), 0.5).double())
    torch.testing.assert_close(rows[3], before[3])  # its partner sent what is no number
    assert mixing.state["reach"][:2].tolist() == [1.0, 4.0]
    mixing.reset()
    assert mixing.state["reach"].tolist() == [0.0] * 4
