from __future__ import annotations

import json
import math

import pytest
import torch

from matcha.errors import InputError
from matcha.training.optimizers import Adam
from matcha.training.rates import Plateau, StepDecay
from matcha.training.settings import Delays, Execution, Settings


@pytest.mark.parametrize(
    "choices",
    [
        {"epochs": 0},
        {"epochs": 1, "evaluate_every": 0},
        {"epochs": 1, "statistics": "none"},
    ],
)
def test_settings_refuse_nonsense(choices):
    with pytest.raises(InputError):
        Settings(**choices)


def test_a_run_is_over_at_its_end_its_target_or_its_divergence():
    settings = Settings(epochs=3, target_loss=0.5)
    assert not settings.is_over(0, None)
    assert not settings.is_over(2, 0.4, [0.6, 0.5])
    assert settings.is_over(2, 0.6, [0.6, 0.5, 0.4])
    assert settings.is_over(3, 0.6)
    assert settings.is_over(1, math.nan)


def test_a_rate_that_follows_the_loss_needs_one_every_epoch():
    often = Settings(epochs=9, evaluate_every=4, schedule=Plateau(base=1.0))
    rarely = Settings(epochs=9, evaluate_every=4)
    assert all(often.is_due(epoch) for epoch in range(1, 10))
    assert [epoch for epoch in range(1, 10) if rarely.is_due(epoch)] == [4, 8, 9]


def test_a_description_is_what_json_gives_back():
    described = Settings(
        epochs=2, schedule=StepDecay(base=0.1, milestones=(1, 2)), optimizer=Adam()
    ).describe()
    assert json.loads(json.dumps(described)) == described
    assert described["schedule_kind"] == "StepDecay"
    assert described["optimizer_kind"] == "Adam"


def test_delays_refuse_nonsense():
    with pytest.raises(InputError, match="link_time"):
        Delays(link_time=float("nan"))


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
