from __future__ import annotations

import pytest
import torch

from matcha.errors import InputError
from matcha.training.execution import Execution


@pytest.mark.parametrize(
    ("precision", "kept", "computed"),
    [
        ("float32", torch.float32, torch.float32),
        ("float64", torch.float64, torch.float64),
        ("bfloat16", torch.float32, torch.bfloat16),
    ],
)
def test_what_is_kept_and_what_is_computed_with(precision, kept, computed):
    execution = Execution(precision=precision)
    assert (execution.dtype, execution.compute_dtype) == (kept, computed)
    layer = torch.nn.Linear(2, 1).to(kept)
    with execution.autocast():
        assert layer(torch.ones(1, 2, dtype=kept)).dtype == computed


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"device": "tpu"}, "cpu or cuda"),
        ({"precision": "int8"}, "precision must be"),
        ({"batching": "all"}, "batching must be"),
        ({"streams": 0}, "1 or more"),
    ],
)
def test_nonsense_is_one_sentence(wrong, sentence):
    with pytest.raises(InputError, match=sentence):
        Execution(**wrong)
