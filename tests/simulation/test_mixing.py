from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.simulation.tasks import er8

from matcha.rounds import Round
from matcha.simulation.mixing import matrices, mix_product, mix_rows


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(
    ("strategy", "mixing"),
    [("matcha", "laplacian"), ("matcha", "pairwise"), ("vanilla", None), ("greedy", None)],
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
