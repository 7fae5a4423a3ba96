from __future__ import annotations

import numpy as np
import pytest
from torch import nn

from matcha.training.task import Evaluation, digest, generator, model_digest


def test_a_generator_is_its_key():
    assert generator(1, 2).random() == generator(1, 2).random()
    assert generator(1, 2).random() != generator(2, 1).random()


def test_arrays_are_told_apart_by_shape_kind_and_content():
    base = np.arange(6)
    others = [base.reshape(2, 3), base.astype(np.int32), base + 1]
    assert digest(base) == digest(np.arange(6))
    assert len({digest(array) for array in [base, *others]}) == 4


def test_a_models_digest_ignores_its_values():
    assert model_digest(nn.Linear(2, 1)) == model_digest(nn.Linear(2, 1))
    assert model_digest(nn.Linear(2, 1)) != model_digest(nn.Linear(2, 1, bias=False))


def test_an_accuracy_is_as_sure_as_its_sample_is_large():
    few, many = (Evaluation(loss=0.1, accuracy=0.9, examples=n) for n in (100, 10_000))
    assert few.accuracy_error == pytest.approx(10 * many.accuracy_error)
    assert Evaluation(loss=0.1).accuracy_error is None
